"""Forward, recompute and backward of one micro-batch use one plan."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering, thinned
from tests.engine import cases_tape

IN_FLIGHT = ("llep", "fsep"), ("layer", "experts"), (("plain", "same"), ("selective", "reversed"), ("plain", "before"))


@pytest.mark.parametrize(
    ("strategy", "recompute", "way"), thinned(list(itertools.product(*IN_FLIGHT)), covering(*IN_FLIGHT))
)
def test_micro_batches_in_flight(ranks, strategy: str, recompute: str, way: tuple[str, str]) -> None:
    how, order = way
    seen = ranks(3).run(
        cases_tape.checkpointed, family="qwen2_moe", strategy=strategy, recompute=recompute, how=how, order=order
    )
    for rank in seen:
        assert rank["observed"] == 2 * rank["layers"], "recompute or evaluation fed the tuner"
        assert rank["rerouted"] == 0


@pytest.mark.parametrize("recompute", ["layer", "experts"])
def test_kept_graph(ranks, recompute: str) -> None:
    ranks(2).run(cases_tape.kept_graph, family="gpt_oss", recompute=recompute)


@pytest.mark.parametrize("recompute", ["layer", "experts"])
def test_router_that_changes_its_mind(ranks, recompute: str) -> None:
    assert ranks(2).run(cases_tape.fickle_router, recompute=recompute) == [3, 3]


def test_recompute_without_a_tape_is_refused(ranks) -> None:
    for message in ranks(2).run(cases_tape.untaped_recompute):
        assert "without the plan of its forward" in message
        assert "gradient_checkpointing" in message
