"""TRL's SFTTrainer, patched by the callback, trains as it does unpatched under FSDP2."""

from __future__ import annotations

import pytest

from tests.integrations import cases

MOVES = {"llep": "spilled", "fsep": "moved"}


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep", "fsdp"])
def test_ten_steps_equal_fsdp2(ranks, tmp_path, strategy: str) -> None:
    totals = ranks(2).run(cases.trl_equals_fsdp2, folder=str(tmp_path), family="qwen3_moe", strategy=strategy)
    assert totals[0] == totals[1]
    assert totals[0]["records"] == 40
    if strategy in MOVES:
        assert totals[0][MOVES[strategy]] > 0, "nothing moved: the test proved nothing"
