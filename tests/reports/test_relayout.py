"""Reports on re-layout: copies, moments, shared slots, and what evaluation and recompute must not count."""

from __future__ import annotations

import numpy as np
import pytest

from tests.covering import later, nightly
from tests.reports import cases_relayout

STRATEGIES = ("llep", "fsep")
BOTH = ("fsep+llep:sharded", "fsep+llep:whole")


def test_b19_copies_of_one_expert(ranks) -> None:
    slots = [[0, 1, 2], [0, 3, 4], [0, 5, -1], [0, 6, -1]]
    for result in ranks(4).run(cases_relayout.replicated, strategy="fsep", experts=7, slots=slots):
        assert all(result["loads"])
        assert result["expert"][0] > 0
    for strategy in STRATEGIES:
        ranks(4).run(cases_relayout.replicated, strategy=strategy, experts=2, slots=None)


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_b36_slots_shared_by_all_layers(ranks, strategy: str) -> None:
    for checkpointing in ("", "layer", "experts"):
        held = ranks(2).run(cases_relayout.pooled, strategy=strategy, checkpointing=checkpointing)
        # Under llep the hot rank's own experts are used where they live.
        assert held[1]["3 layers"] > 0
        assert all(of["3 layers"] == of["6 layers"] <= of["of all experts"] for of in held)


@pytest.mark.parametrize("accumulation", [*later(1), 3])
def test_b37_moments_of_moved_experts(ranks, accumulation: int) -> None:
    ranks(2).run(cases_relayout.moved, accumulation=accumulation)


@pytest.mark.parametrize("strategy", [*nightly(*STRATEGIES, BOTH[0]), BOTH[1]])
def test_b38_every_way_to_run_after_a_move(ranks, strategy: str) -> None:
    ranks(2).run(cases_relayout.every_way, strategy=strategy)


@pytest.mark.parametrize("strategy", ["llep", *later("fsep", BOTH[0]), BOTH[1]])
def test_b49_evaluation_is_not_counted(ranks, strategy: str) -> None:
    runs = [ranks(2).run(cases_relayout.evaluated, strategy=strategy, evaluations=times) for times in (0, 2)]
    for without, evaluated in zip(*runs, strict=True):
        for key in ("memory", "plans", "records"):
            assert without[key] == evaluated[key]
        for name, weight in without["weights"].items():
            np.testing.assert_array_equal(evaluated["weights"][name], weight, err_msg=name)


@pytest.mark.parametrize(("strategy", "accumulation"), [("llep", 3), ("fsep", 1), *later(("llep", 1), ("fsep", 3))])
def test_b50_recompute_is_not_counted(ranks, strategy: str, accumulation: int) -> None:
    settings = {"strategy": strategy, "accumulation": accumulation}
    runs = [ranks(2).run(cases_relayout.recomputed, recompute=how, **settings) for how in ("", "layer", "experts")]
    assert runs[0][0]["plans"]
    assert runs[0] == runs[1] == runs[2]
