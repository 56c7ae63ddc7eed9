"""The published rivals: valid plans at any size, and their own documented or defining behaviour."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import (
    Placement,
    chunk_owners,
    ep,
    eplb,
    eplb_placement,
    exact_split,
    fastermoe,
    flexmoe,
    flexmoe_placement,
    fsdp_ep,
    fsep,
    fsep_llep,
    initial_placement,
    laer,
    laer_placement,
    lplb,
    prophet,
    prophet_placement,
    smartmoe,
    smartmoe_owners,
)
from tests.plan.oracles import (
    check_own_tokens_first,
    check_plan,
    every_slot_serves_its_ranges,
    lowest_maximum,
    stays_home,
)


@st.composite
def cases(draw):
    ranks, experts = draw(st.integers(1, 8)), draw(st.integers(1, 14))
    slots = draw(st.integers(-(-experts // ranks), experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.integers(0, 9, experts)
    now, then = (rng.integers(0, draw(st.sampled_from([1, 6, 500])) + 1, (ranks, experts)) * skew for _ in "ab")
    return now, then, slots, draw(st.sampled_from([None, 2, 3]))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_planner_routes_every_token(case):
    loads, earlier, slots, width = case
    ranks, experts = loads.shape
    owners = chunk_owners(experts, ranks)
    placement = laer_placement(earlier, ranks, slots, width)
    packed = eplb_placement(earlier, ranks, slots, width)
    plans = [
        fsdp_ep(loads, slots),
        laer(loads, placement, width),
        eplb(loads, packed),
        lplb(loads, packed, width),
        fastermoe(loads, owners, transfer_tokens=5),
        prophet(loads, prophet_placement(earlier, owners, transfer_tokens=5), owners),
        smartmoe(loads, smartmoe_owners(earlier, owners, ranks)),
        flexmoe(loads, flexmoe_placement(earlier, initial_placement(experts, ranks, slots))),
        fsep_llep(loads, placement, width, min_tokens_per_gemm=3),
    ]
    for plan in plans:
        check_plan(plan, loads)


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([1, 7, 1024]))
def test_spill_after_the_split_keeps_capacity(case, least):
    loads, earlier, slots, width = case
    placement = laer_placement(earlier, len(loads), slots, width)
    plan = fsep_llep(loads, placement, width, min_tokens_per_gemm=least)
    check_plan(plan, loads)
    assert every_slot_serves_its_ranges(plan)
    check_own_tokens_first(plan, loads)
    assert plan.rank_loads.max() <= -(-loads.sum() // len(loads)) + least - 1
    grown = plan.placement.slots[:, : placement.slots.shape[1]]
    assert (grown[placement.slots >= 0] == placement.slots[placement.slots >= 0]).all()
    if fsep(loads, placement, width).rank_loads.max() <= -(-loads.sum() // len(loads)) + least - 1:
        assert plan.spilled == 0


def test_eplb_documented_example():
    """12 experts in 4 groups, 16 copies on 2 nodes x 4 ranks: the ``phy2log`` that the reference's README prints."""
    first = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    second = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]
    want = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    for load, table in zip((first, second), want, strict=True):
        got = eplb_placement(np.array(load), 8, 2, 4, expert_groups=4).slots
        assert got.ravel().tolist() == table


def test_eplb_flat_when_groups_do_not_divide():
    load = np.arange(1, 13)
    flat = eplb_placement(load, 8, 2, 4).slots
    assert (eplb_placement(load, 8, 2, 4, expert_groups=5).slots == flat).all()


def test_laer_uses_copies_on_the_own_node_evenly():
    loads = np.array([[8], [0], [0], [4]])
    plan = laer(loads, Placement(np.array([[0], [0], [0], [-1]])), 2)
    check_plan(plan, loads)
    assert plan.rank_loads.tolist() == [4, 4, 4, 0]
    everywhere = laer(loads, Placement(np.array([[0], [0], [-1], [-1]])), 2)
    assert everywhere.rank_loads.tolist() == [6, 6, 0, 0]


def test_fsdp_ep_keeps_tokens_in_their_group():
    loads = np.random.default_rng(0).integers(0, 9, (8, 8))
    plan = fsdp_ep(loads, 2)
    check_plan(plan, loads)
    assert plan.placement.slots.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
    assert plan.rank_loads[:4].sum() == loads[:4].sum()


def test_fastermoe_shadows_a_hot_expert_and_weighs_the_cost():
    loads = np.full((4, 4), 10)
    loads[:, 0] = 100
    owners = chunk_owners(4, 4)
    plan = fastermoe(loads, owners, transfer_tokens=10)
    assert plan.rank_loads.tolist() == [100 + 0, 140, 140, 140]
    assert fastermoe(loads, owners, transfer_tokens=1000).digest() == ep(loads, owners).digest()


def test_prophet_copies_to_some_ranks_only():
    loads = np.array([[0, 0, 0, 0], [45, 1, 1, 1], [45, 9, 9, 9], [0, 9, 9, 9]])
    owners = chunk_owners(4, 4)
    placement = prophet_placement(loads, owners, transfer_tokens=5)
    assert [0 in row for row in placement.slots] == [True, True, False, False]
    plan = prophet(loads, placement, owners)
    assert plan.rank_loads[0] == 45  # rank 1 keeps its own, rank 2 still sends
    assert stays_home(plan, loads) >= 45


def test_smartmoe_moves_few_and_helps():
    load = np.array([90, 80, 5, 5, 10, 10, 10, 10])
    owners = chunk_owners(8, 4)
    new = smartmoe_owners(load, owners, 4)
    assert np.bincount(new, load).max() < np.bincount(owners, load).max()
    assert (new != owners).sum() <= 4
    assert np.bincount(new).max() <= 2


def test_flexmoe_moves_a_copy_from_cold_to_hot():
    placement = Placement(np.array([[0, 1], [1, 2], [2, 3], [3, 1]]))
    load = np.array([80, 12, 10, 10])
    changed = flexmoe_placement(load, placement)
    assert (changed.slots == 0).sum() > 1
    assert (flexmoe_placement(load, placement, move_tokens=10**6).slots == placement.slots).all()
    assert (flexmoe_placement(load, placement, rounds=0).slots == placement.slots).all()


def test_lplb_is_optimal_on_its_placement():
    rng = np.random.default_rng(2)
    loads = rng.integers(0, 50, (6, 10))
    placement = eplb_placement(rng.integers(0, 50, 10), 6, 3)
    assert lplb(loads, placement).rank_loads.max() == lowest_maximum(loads.sum(axis=0), placement.slots)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_exact_split_beats_the_even_one(case):
    loads, earlier, slots, width = case
    placement = laer_placement(earlier, len(loads), slots, width)
    exact = exact_split(loads, placement, width).rank_loads(len(loads)).max()
    assert exact <= laer(loads, placement, width).rank_loads.max()
    assert exact <= eplb(loads, placement).rank_loads.max()


def test_bad_input():
    loads = np.ones((2, 4), np.int64)
    with pytest.raises(ValueError, match="transfer_tokens=-1"):
        fastermoe(loads, chunk_owners(4, 2), transfer_tokens=-1)
    with pytest.raises(ValueError, match="owns expert 3"):
        prophet(loads, Placement(np.array([[0, 1, 3], [2, -1, -1]])), chunk_owners(4, 2))
    with pytest.raises(ValueError, match="1 slots on each of 2"):
        fsdp_ep(loads, 1)
    with pytest.raises(ValueError, match="expert 3 has 2 tokens"):
        laer(loads, Placement(np.array([[0, 1], [2, -1]])))
    with pytest.raises(ValueError, match="trail"):
        laer(loads, Placement(np.array([[-1, 1], [2, 3]])))
    with pytest.raises(ValueError, match="rounds=-1"):
        flexmoe_placement(loads, Placement(np.array([[0, 1], [2, 3]])), rounds=-1)
