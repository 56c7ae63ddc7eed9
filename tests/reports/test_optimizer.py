"""Reports on clipping, optimizers and dtypes (section D), each tried under Accelerate's FSDP2."""

from __future__ import annotations

import pytest
import torch

from tests.covering import later
from tests.integrations import cases_trl
from tests.reports import cases_optimizer as cases


@pytest.mark.parametrize("strategy", [*later("ep"), "fsep"])
def test_b56_clipping(ranks, strategy: str) -> None:
    ranks(2).run(cases.clipped_by_torch, strategy=strategy)
    norms = ranks(4).run(cases.steps_like_one_process, strategy=strategy, optimizers=["default"], steps=2)
    assert min(norms[0]["default"]) > 2 * cases.MAX_NORM, "nothing was clipped: the test proved nothing"


@pytest.mark.long
def test_b56_clipping_by_the_trainer(ranks, tmp_path) -> None:
    settings = {"max_grad_norm": cases.MAX_NORM, "max_steps": 3}
    ranks(4).run(cases_trl.trains, folder=str(tmp_path), family="qwen3_moe", strategy="fsep", **settings)


def test_b57_norms_of_ranks_add_up(ranks) -> None:
    """157 whoever owns what, and where ranks hold the same expert (averaging gives 144.5)."""
    found = [ranks(2).run(cases.known_norms, strategy=strategy) for strategy in ("ep", "fsep")]
    found.append(ranks(4).run(cases.known_norms, strategy="ep", parallelism=(2, 2)))
    for of_ranks in found:
        for total, norm, left in of_ranks:
            assert (total, norm, left) == pytest.approx((157.0, 157.0, 1.0), rel=1e-5)


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_b59_optimizers(ranks, strategy: str) -> None:
    kinds = list(cases.OPTIMIZERS) if strategy == "fsep" else ["foreach"]
    ranks(2).run(cases.steps_like_one_process, strategy=strategy, optimizers=kinds, steps=2)


def test_b59_adafactor(ranks) -> None:
    """As unpatched: PyTorch 2.13 and Transformers 5.24 both fail on FSDP2's parameters, experts or not."""
    for outcomes in ranks(2).run(cases.adafactors, strategy="fsep"):
        for name, (theirs, ours) in outcomes.items():
            assert ours == theirs, name


@pytest.mark.parametrize("strategy", ["ep", "fsep"])
def test_b60_experts_first_used_late(ranks, strategy: str) -> None:
    for of_rank in ranks(2).run(cases.first_used_late, strategy=strategy):
        for name, (theirs, ours) in of_rank.items():
            assert ours <= 1.5 * theirs + 4e-3, f"{name}: {ours:.2e} against the unpatched model's {theirs:.2e}"


@pytest.fixture(scope="module")
def mixed(ranks):
    """Twenty steps of mixed precision, by strategy, on rank 0."""
    return {strategy: ranks(2).run(cases.master_weights, strategy=strategy)[0] for strategy in ("ep", "fsep")}


def test_b61_masters_are_float32(mixed) -> None:
    for found in mixed.values():
        assert found["storage"] == found["moments"] == {torch.float32}
        for name, moved in found["moved"].items():
            # A bf16 weight of 1 moves by 4e-3 or not at all.
            assert 1e-4 < moved < 2.5e-4, name


def test_b62_one_policy(mixed) -> None:
    for found in mixed.values():
        assert found["compute"] == {torch.bfloat16}
        assert found["reduce"] == {torch.float32}
        assert len(found["router"]) == 1


def test_b63_optimizer_holds_what_is_trained(ranks) -> None:
    ranks(2).run(cases.optimizer_holds_what_is_trained)


def test_b63_too_late(ranks, tmp_path) -> None:
    ranks(2).run(cases.patched_too_late, folder=str(tmp_path))


@pytest.mark.parametrize("strategy", ["ep", "fsep"])
def test_b66_accumulation(ranks, strategy: str) -> None:
    """FSDP reduces once a step; experts' gradients go home in each micro-batch (docs/limits.md)."""
    for seen in ranks(2).run(cases.accumulated, strategy=strategy):
        assert [counts["home"] for counts in seen] == [2, 4, 6, 8], "two layers, four micro-batches"
        assert [counts["reduced"] > 0 for counts in seen] == [False, False, False, True]
