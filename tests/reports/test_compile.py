"""Reports on activation checkpointing, torch.compile and deterministic mode."""

from __future__ import annotations

import shutil

import pytest

from tests.covering import later, nightly
from tests.reports import cases_compile


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_b75_recompute_follows_the_forward(ranks, strategy: str) -> None:
    tokens = (21, 5, 18, 8)
    for rank, counts in enumerate(ranks(4).run(cases_compile.recomputed, strategy=strategy)):
        assert counts.pop("drift") == 2 * tokens[rank], "no router changed its mind: the test proved nothing"
        assert set(counts.values()) == {0}


@pytest.mark.parametrize("strategy", ["llep", "fsep", *later("ep", "fsdp")])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_b79_deterministic_mode(ranks, family: str, strategy: str) -> None:
    ranks(2).run(cases_compile.deterministic, family=family, strategy=strategy)


BACKENDS = ["eager", *later("aot_eager")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_b77_block(ranks, backend: str) -> None:
    arguments = {"family": "mixtral", "strategy": "llep", "backend": backend}
    for compiled in ranks(2).run(cases_compile.compiled_block, seconds=170, **arguments):
        compiled.check(settled=4, most=8)


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, *nightly(True)])
def test_b77_model(ranks, whole: bool) -> None:
    """Graphs of gradients too where the whole is compiled; those of layers are in ``test_b77_regional``."""
    arguments = {"strategy": "fsep", "backend": "aot_eager" if whole else "eager", "whole": whole}
    for compiled in ranks(2).run(cases_compile.compiled_model, seconds=170, **arguments):
        compiled.check(settled=4, most=24)


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's kernels for CPUs need a compiler")
@pytest.mark.parametrize(
    ("strategy", "checkpointing"), [("fsep", True), *nightly(("llep", False), ("llep", True), ("fsep", False))]
)
def test_b77_regional_inductor(ranks, strategy: str, checkpointing: bool) -> None:
    arguments = {"strategy": strategy, "backend": "inductor", "checkpointing": checkpointing}
    for counts, compiled in ranks(2).run(cases_compile.regional, seconds=400, **arguments):
        assert counts["moved" if strategy == "fsep" else "spilled"] > 0
        compiled.check(settled=1, most=8)


@pytest.mark.parametrize("checkpointing", [*later(False), True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_b77_regional(ranks, backend: str, checkpointing: bool) -> None:
    arguments = {"strategy": "fsep", "backend": backend, "checkpointing": checkpointing}
    for counts, compiled in ranks(2).run(cases_compile.regional, seconds=170, **arguments):
        assert counts["moved"] > 0
        compiled.check(settled=1, most=8)
