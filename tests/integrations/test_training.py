"""Ten AdamW steps, patched, equal ten under unpatched FSDP2: TRL's trainer and a plain Accelerate loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import cases

STRATEGIES = ("ep", "llep", "fsep", "fsdp")
MOVES = {"llep": "spilled", "fsep": "moved"}


def check(ranks, case: Any, strategy: str, *, world_size: int = 2, **arguments: Any) -> None:
    """Runs a case; all ranks count the same, and something moved where the strategy moves anything."""
    counts = ranks(world_size).run(case, strategy=strategy, **arguments)
    assert all(count == counts[0] for count in counts)
    assert counts[0]["records"] == 40, "two layers, ten steps, two micro-batches"
    if strategy in MOVES:
        assert counts[0][MOVES[strategy]] > 0, "nothing moved: the test proved nothing"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trl(ranks, tmp_path, strategy: str) -> None:
    check(ranks, cases.trl, strategy, folder=str(tmp_path), family="qwen3_moe")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_trl_families(ranks, tmp_path, family: str) -> None:
    check(ranks, cases.trl, "fsep", folder=str(tmp_path), family=family)


@pytest.mark.parametrize("kwargs", [None, {"selective": True}], ids=["default", "selective"])
@pytest.mark.parametrize("strategy", ["llep", "fsep"])
def test_trl_checkpointing(ranks, tmp_path, strategy: str, kwargs: dict[str, Any] | None) -> None:
    on = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    check(ranks, cases.trl, strategy, folder=str(tmp_path), family="qwen3_moe", **on)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loop(ranks, strategy: str) -> None:
    check(ranks, cases.loop, strategy, family="qwen3_moe")


@pytest.mark.parametrize("settings", [{}, {"recompute": "experts"}], ids=["layer", "experts"])
def test_accelerate_checkpointing(ranks, settings: dict[str, str]) -> None:
    check(ranks, cases.checkpointed_by_accelerate, "fsep", **settings)
