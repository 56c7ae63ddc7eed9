"""LLEP: capacity kept, no duplicate helper, owners first; the reference's faults are tests here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import chunk_owners, ep, llep
from tests.plan.oracles import check_plan, one_replica_per_slot, stays_home


@st.composite
def cases(draw):
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 14))
    top = draw(st.sampled_from([1, 5, 40, 3_000_000_000]))
    skew = draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(0, top + 1, (ranks, experts)) * np.array(skew)


def plan_of(loads, *, factor=1.0, least=1, threshold=1.0, node=None):
    owners = chunk_owners(loads.shape[1], loads.shape[0])
    return llep(
        loads,
        owners,
        capacity_factor=factor,
        min_tokens_per_gemm=least,
        imbalance_threshold=threshold,
        ranks_per_node=node,
    )


def capacity_of(loads, factor=1.0):
    return int(np.ceil(factor * loads.sum() / len(loads)))


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1, 2, 7, 30, 1024]), st.sampled_from([None, 2, 3]))
def test_plans_hold_every_promise(loads, least, node):
    ranks, experts = loads.shape
    owners = chunk_owners(experts, ranks)
    plan = plan_of(loads, least=least, node=node)
    check_plan(plan, loads)
    assert one_replica_per_slot(plan)  # no helper twice: a rank's slots are distinct, one replica each
    native = np.bincount(owners, loads.sum(axis=0), ranks).astype(np.int64)
    assert plan.rank_loads.max() <= max(capacity_of(loads) + least - 1, 0)
    quotas, spilled = plan.split.quotas(), 0
    for expert in range(experts):
        part = slice(plan.split.first[expert], plan.split.first[expert + 1])
        ranks_of, tokens = plan.split.rank[part], quotas[part]
        assert owners[expert] in ranks_of
        assert (np.diff(ranks_of) > 0).all()
        away = tokens[ranks_of != owners[expert]]
        assert (away > 0).all()
        assert (away < least).sum() <= 1  # at most the chunk that ends an expert
        spilled += away.sum()
    assert plan.spilled == spilled
    for rank in range(ranks):
        mine = np.flatnonzero(owners == rank)
        assert plan.placement.held_by(rank)[: len(mine)].tolist() == mine.tolist()
    if least == 1:  # exactly the excess leaves
        assert spilled == np.maximum(native - capacity_of(loads), 0).sum()


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 7]))
def test_a_larger_capacity_spills_less(loads, least):
    plans = [plan_of(loads, factor=factor, least=least) for factor in (1.0, 1.25, 1.5, 2.0, 4.0)]
    if least == 1:
        spills = [plan.spilled for plan in plans]
        assert spills == sorted(spills, reverse=True)
    for factor, plan in zip((1.0, 1.25, 1.5, 2.0, 4.0), plans, strict=True):
        assert plan.rank_loads.max() <= max(capacity_of(loads, factor) + least - 1, 0)


def test_below_the_threshold_it_is_ep():
    loads = np.array([[12, 8], [12, 8]])  # owners hold 24 and 16: 1.2
    owners = chunk_owners(2, 2)
    assert plan_of(loads, threshold=1.3).digest() == ep(loads, owners).digest()
    assert plan_of(loads, threshold=1.2).spilled == 4


def test_no_helper_twice_where_the_total_does_not_divide():
    """Fault 1: at P=2 the reference named a helper twice in half of such plans, and lost gradients."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        loads = rng.integers(0, 50, (2, 6))
        loads[0, 0] += 1 - loads.sum() % 2
        plan = plan_of(loads)
        assert one_replica_per_slot(plan)
        assert plan.rank_loads.max() <= -(-loads.sum() // 2)


def test_capacity_is_rounded_up():
    """Fault 2: with a floor, 101 tokens on 2 ranks leave one homeless, and small experts are bumped around
    for it.
    """
    loads = np.zeros((2, 34), np.int64)
    loads[:, 0] = 34
    loads[0, 1:] = 1
    assert loads.sum() == 101
    plan = plan_of(loads)
    assert len(plan.split.rank) - 34 == 1
    assert sorted(plan.rank_loads.tolist()) == [50, 51]


def test_owner_takes_what_is_not_worth_a_transfer():
    loads = np.array([[40, 10], [40, 10]])  # owners 80 and 20, capacity 50
    assert plan_of(loads, least=31).spilled == 0
    assert plan_of(loads, least=30).spilled == 30


def test_no_dump_on_one_rank():
    """Where each helper has room for less than m, the rest is not dumped on one of them."""
    loads = np.full((8, 8), 90)
    loads[:, 0] = 180
    plan = plan_of(loads, least=200)
    assert plan.rank_loads.max() <= capacity_of(loads) + 199


def test_expert_ids_beyond_256_and_ranks_that_do_not_divide():
    """Faults 4 and 5."""
    loads = np.ones((7, 500), np.int64)
    loads[:, 499] = 2000
    plan = plan_of(loads)
    check_plan(plan, loads)
    helped = plan.split.rank[plan.split.first[499] :]
    assert len(helped) == 7
    assert all(499 in plan.placement.held_by(rank) for rank in helped)
    assert np.ptp(plan.rank_loads) <= 1 + 7


def test_helpers_on_the_own_node_come_first():
    loads = np.full((4, 4), 5)
    loads[:, 0], loads[:, 1] = (
        30,
        8,
    )  # owners 120, 32, 20, 20: capacity 96, rank 1 has room for the 24 above it
    part = slice(0, 2)
    near, far = plan_of(loads, factor=2.0, node=2), plan_of(loads, factor=2.0)
    assert near.split.rank[part].tolist() == [0, 1]
    assert far.split.rank[part].tolist() == [0, 2]


def test_many_tokens_stay_home():
    loads = np.full((4, 4), 10)
    loads[:, 1] = 50
    plan = plan_of(loads)
    assert stays_home(plan, loads) >= loads.sum() // 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"factor": 0.5}, "capacity_factor=0.5"),
        ({"factor": float("nan")}, "capacity_factor=nan"),
        ({"threshold": 0.9}, "imbalance_threshold=0.9"),
        ({"least": 0}, "min_tokens_per_gemm=0"),
        ({"node": 0}, "ranks_per_node=0"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        plan_of(np.ones((2, 2), np.int64), **setting)
