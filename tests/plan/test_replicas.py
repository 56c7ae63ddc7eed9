"""Replicas of experts that live with an owner: pinned, as few as are worth it, never slower than LLEP."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import (
    EMPTY,
    CostModel,
    Placement,
    begins_with_owned,
    chunk_owners,
    ep,
    exact_split,
    imbalance,
    llep,
    llep_ahead,
    predict,
    replica_placement,
    topology,
    used,
)
from tests.plan.oracles import check_plan


@st.composite
def cases(draw):
    """Loads ``[N, E]`` now, the forecast ``[E]``, slots per rank, and ranks of a node."""
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 14))
    top = draw(st.sampled_from([1, 40, 3_000_000_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    now = rng.integers(0, top + 1, (ranks, experts)) * rng.integers(0, 6, experts)
    expected = now.sum(axis=0) if draw(st.booleans()) else rng.integers(0, top + 1, experts)
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    return now, expected, slots, draw(st.sampled_from([1, 2, 4, 9]))


def of(loads: np.ndarray, expected: np.ndarray, slots: int, width: int = 9, **given) -> Placement:
    owners = chunk_owners(loads.shape[1], len(loads))
    return replica_placement(expected, owners, len(loads), slots, width, **given)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1, 7, 1024]), st.booleans())
def test_own_experts_come_first_and_everything_is_served(case, least, weighed):
    now, expected, slots, width = case
    ranks, experts = now.shape
    owners = chunk_owners(experts, ranks)
    cost = CostModel(topology("h200", 1, ranks), 64, 64, 1) if weighed else None
    if weighed and ranks % width == 0:
        cost = replace(cost, topology=topology("h200", ranks // width, width))
    told = {"min_tokens_per_gemm": least, "cost": cost}
    placement = of(now, expected, slots, width, recent=[now[0]], **told)
    assert placement.slots.shape == (ranks, min(slots, experts))
    assert begins_with_owned(placement, owners)
    plan = llep_ahead(now, owners, placement, ranks_per_node=width, **told)
    check_plan(plan, now)
    assert begins_with_owned(plan.placement, owners)
    if cost is None:
        assert used(placement, plan) is placement
        # Only what was foreseen, or what was spilled, is held.
        extra = (plan.placement.slots != EMPTY).sum() - (placement.slots != EMPTY).sum()
        assert (plan.spilled > 0) == (extra > 0)
        assert plan.rank_loads.max() <= max(-(-now.sum() // ranks) + least - 1, 0)
    again = of(now.copy(), expected.copy(), slots, width, recent=[now[0].copy()], **told)
    assert (again.slots == placement.slots).all()


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([(64, 64), (2048, 768), (4096, 14336)]), st.sampled_from([1, 1024]))
def test_never_predicted_slower_than_llep_or_ep(case, sizes, least):
    now, expected, slots, _ = case
    ranks, experts = now.shape
    now = now // max(1, int(now.max()) // 20_000)
    owners, cost = chunk_owners(experts, ranks), CostModel(topology("h200", 1, ranks), *sizes, 1)
    placement = of(now, expected, slots, min_tokens_per_gemm=least, cost=cost)
    told = {"min_tokens_per_gemm": least, "cost": cost}
    plan = llep_ahead(now, owners, placement, **told)
    got = predict(plan, now, cost, home="whole", owners=owners, foreseen=used(placement, plan)).predicted
    for other in (ep(now, owners), llep(now, owners, min_tokens_per_gemm=least, imbalance_threshold=1.0)):
        assert got.seconds <= predict(other, now, cost, home="whole", owners=owners).predicted.seconds


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 4), (3, 5), (4, 3)]))
def test_against_every_choice_of_replicas(seed, sizes):
    """Of all ways to add one replica per rank, none levels the expected loads by a fifth better."""
    ranks, experts = sizes
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 1000, experts)
    owners, slots = chunk_owners(experts, ranks), -(-experts // ranks) + 1
    now = load // ranks + (np.arange(ranks)[:, None] < load % ranks)
    mine = of(now, load, slots, min_tokens_per_gemm=1, hedge_permille=0)
    own = [np.flatnonzero(owners == rank).tolist() for rank in range(ranks)]
    choices = [
        itertools.combinations([e for e in range(experts) if e not in own[rank]], min(slots, experts) - len(own[rank]))
        for rank in range(ranks)
    ]
    best = min(
        exact_split(now, Placement(np.array([[*a, *b] for a, b in zip(own, extra, strict=True)])))
        .rank_loads(ranks)
        .max()
        for extra in itertools.product(*map(list, choices))
    )
    assert exact_split(now, mine).rank_loads(ranks).max() <= max(1.2 * best, best + 1)


def test_replicas_of_fewer_are_among_those_of_more():
    from hf_laer.plan.pinned import with_replicas

    load, owners = np.random.default_rng(3).integers(0, 999, 12), chunk_owners(12, 5)
    tables = [with_replicas(load, owners, 5, 5, 2, count) for count in range(14)]
    for fewer, more in itertools.pairwise(tables):
        assert ((fewer == EMPTY) | (fewer == more)).all()
        assert (more != EMPTY).sum() - (fewer != EMPTY).sum() in (0, 1)
    assert (tables[0] != EMPTY).sum() == 12
    assert (tables[-1] != EMPTY).all()


def test_nothing_is_placed_where_nothing_is_won():
    even = np.full((4, 8), 500)
    owners = chunk_owners(8, 4)
    hot = even.copy()
    hot[:, 0] = 4000
    assert (of(even, even.sum(0), 4, min_tokens_per_gemm=1).slots != EMPTY).sum() == 8
    assert (of(hot, hot.sum(0), 4, min_tokens_per_gemm=1).slots != EMPTY).sum() > 8
    # By a threshold, as LLEP's.
    assert (of(hot, hot.sum(0), 4, imbalance_threshold=4.0).slots != EMPTY).sum() == 8
    # Where an expert's way takes longer than it saves.
    small = CostModel(topology("h200", 1, 4), 4096, 14336, 2)
    assert (of(hot // 100, hot.sum(0) // 100, 4, cost=small).slots != EMPTY).sum() == 8
    plan = llep_ahead(hot // 100, owners, of(hot // 100, hot.sum(0) // 100, 4, cost=small), cost=small)
    assert plan.digest() == ep(hot // 100, owners).digest()
    # Where nothing travels ahead of need, a helper is as good once the loads are known.
    large = {"cost": small, "min_tokens_per_gemm": 256}
    assert (of(hot, hot.sum(0), 4, ahead=False, **large).slots != EMPTY).sum() == 8
    assert (of(hot, hot.sum(0), 4, **large).slots != EMPTY).sum() > 8


def test_what_was_foreseen_travels_hidden():
    hot = np.full((4, 8), 10_000)
    hot[:, 0] = 80_000
    owners, cost = chunk_owners(8, 4), CostModel(topology("h200", 1, 4), 2048, 768, 2)
    placement = of(hot, hot.sum(0), 3, cost=cost)
    plan = llep_ahead(hot, owners, placement, cost=cost)
    assert plan.spilled == 0
    assert imbalance(plan.rank_loads) < 1.05
    ours = predict(plan, hot, cost, home="whole", owners=owners, foreseen=used(placement, plan)).predicted
    late = llep(hot, owners, imbalance_threshold=1.0, cost=cost).predicted
    assert ours.weights_exposed_seconds < 0.5 * late.weights_exposed_seconds


def test_ranks_that_own_nothing_get_replicas():
    load = np.array([900, 100, 0])
    now = np.tile(load, (8, 1))
    placement = of(now, now.sum(0), 2, 4, min_tokens_per_gemm=1)
    assert placement.slots[0, 0] == 0
    assert (placement.slots[3:, 0] != EMPTY).all(), "owners of nothing would idle"
    assert imbalance(llep_ahead(now, chunk_owners(3, 8), placement, ranks_per_node=4).rank_loads) < 1.2


def test_a_plan_without_the_foreseen_slots_is_told_apart():
    owners = chunk_owners(4, 2)
    loads = np.full((2, 4), 5)
    placement = Placement(np.array([[0, 1, 2], [2, 3, EMPTY]]))
    assert used(placement, ep(loads, owners)) is None
    assert used(Placement(np.array([[0, 1, EMPTY], [2, 3, EMPTY]])), ep(loads, owners)) is not None
    assert not begins_with_owned(Placement(np.array([[1, 0, 2], [2, 3, 0]])), owners)
    assert not begins_with_owned(Placement(np.array([[0], [2]])), owners)


@pytest.mark.parametrize(("slots", "match"), [(1, "give 2 or more"), (0, "slots=0 must be at least 1")])
def test_too_few_slots(slots, match):
    with pytest.raises(ValueError, match=match):
        of(np.ones((2, 4), np.int64), np.ones(4, np.int64), slots)
    with pytest.raises(ValueError, match="rank 0 owns 3 experts, which 2 slots do not hold"):
        replica_placement(np.ones(4, np.int64), np.array([0, 0, 0, 1]), 2, 2)
