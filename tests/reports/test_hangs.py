"""Reports on hangs: uneven or no tokens, unequal numbers of calls, order of collectives, groups made late."""

from __future__ import annotations

import pytest

from tests.covering import later
from tests.integrations import cases_trl
from tests.reports import cases_hangs

STRATEGIES = ("llep", "fsep")


def test_b01_experts_used_on_one_rank_only(ranks) -> None:
    for strategy in STRATEGIES:
        ranks(2).run(cases_hangs.disjoint, strategy=strategy)
    cases_hangs.module_lists()


def test_b02_a_rank_that_receives_nothing(ranks) -> None:
    all_rows = 2 * (3 * 7 + 1 * 5)
    for strategy, spill, idle in (("ep", False, True), ("llep", False, True), ("llep", True, False)):
        for loads in ranks(2).run(cases_hangs.one_sided, strategy=strategy, spill=spill):
            assert sum(loads) == all_rows
            assert (loads[1] == 0) == idle


def test_b05_count_matrices_with_holes(ranks) -> None:
    ranks(4).run(cases_hangs.matrices)
    for strategy in ("ep", *STRATEGIES):
        ranks(4).run(cases_hangs.matrix_layers, strategy=strategy)


def test_b06_calls_without_tokens(ranks) -> None:
    for strategy in ("ep", *STRATEGIES, "fsdp"):
        ranks(4).run(cases_hangs.empty_calls, strategy=strategy)


def test_b08_unequal_evaluation(ranks, tmp_path) -> None:
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
    ranks(2).run(cases_trl.trains, folder=str(tmp_path), family="qwen3_moe", strategy="llep", **settings)


@pytest.mark.parametrize("prepared", [False, True], ids=["mesh", "accelerate"])
def test_b08_sequences_that_end_early_on_one_rank(ranks, prepared: bool) -> None:
    for strategy in STRATEGIES:
        (first,), (second,) = ranks(2).run(cases_hangs.generated, strategy=strategy, prepared=prepared)
        assert first < second == 9


@pytest.mark.parametrize("prepared", [*later(False), True])
def test_b08_a_forward_on_one_rank_only(ranks, tmp_path, prepared: bool) -> None:
    limit = 3.0
    alone, other = ranks(2).run(cases_hangs.alone, folder=str(tmp_path), prepared=prepared, limit=limit)
    assert not other["kind"]
    assert alone["seconds"] < limit + 3
    # Under Accelerate it is FSDP's own collective that waits.
    assert alone["kind"] == ("RuntimeError" if prepared else "CollectiveError")
    assert prepared or "all-gather of weights in model.layers.0.mlp.experts" in alone["message"]


def sleepy(ranks, strategy: str, steps: int) -> None:
    traces = ranks(4).run(cases_hangs.sleepy, strategy=strategy, steps=steps, seconds=90.0 + steps)
    for trace in traces[1:]:
        assert trace == traces[0]
    calls = {len(trace) for trace in traces[0].values()}
    assert min(calls) > 3 * 8 * steps


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_b09_order_of_collectives(ranks, strategy: str) -> None:
    sleepy(ranks, strategy, 3)


@pytest.mark.timeout(300)
@pytest.mark.nightly
@pytest.mark.parametrize("steps", [15, 50])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b09_order_of_collectives_over_many_steps(ranks, strategy: str, steps: int) -> None:
    sleepy(ranks, strategy, steps)


def test_b10_groups_are_made_in_setup(ranks, tmp_path) -> None:
    for counts in ranks(2).run(cases_hangs.groups_made, folder=str(tmp_path), strategy="fsep"):
        assert counts == {"hf_laer_tokens": 1, "hf_laer_weights": 1}


def test_b11_an_infinite_gradient_on_one_rank(ranks) -> None:
    for strategy in STRATEGIES:
        assert ranks(2).run(cases_hangs.spoilt, strategy=strategy) == [[False, True, False, False]] * 2
