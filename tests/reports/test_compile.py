"""Reports on activation checkpointing, torch.compile and deterministic mode."""

from __future__ import annotations

import pytest

from tests.reports import cases_compile


@pytest.mark.parametrize("strategy", ["llep", "fsep"])
def test_b75_recompute_follows_the_forward(ranks, strategy: str) -> None:
    tokens = (21, 5, 18, 8)
    for rank, counts in enumerate(ranks(4).run(cases_compile.recomputed, strategy=strategy)):
        assert counts.pop("drift") == 2 * tokens[rank], "no router changed its mind: the test proved nothing"
        assert set(counts.values()) == {0}


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep", "fsdp"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_b79_deterministic_mode(ranks, family: str, strategy: str) -> None:
    ranks(2).run(cases_compile.deterministic, family=family, strategy=strategy)
