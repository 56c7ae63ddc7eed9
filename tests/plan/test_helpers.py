"""What is fetched once the loads are known: as few experts as let the ranks come down, and each is used."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import EMPTY, Placement, chunk_owners, fsep, fsep_llep, fsep_placement, llep
from tests.plan.oracles import check_plan, fewest_fetches, lowest_maximum


@st.composite
def cases(draw):
    """Loads ``[N, E]``, a placement made for other ones, and ranks of a node."""
    ranks, experts = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    top = draw(st.sampled_from([1, 40, 3_000_000_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = rng.integers(0, top + 1, (ranks, experts)) * rng.integers(0, 6, experts)
    slots = -(-experts // ranks) + draw(st.integers(0, 2))
    width = draw(st.sampled_from([1, 2, 3, 7]))
    return loads, fsep_placement(rng.integers(0, 100, experts), ranks, slots, width), width


def helpers(plan, placement) -> int:
    return int((plan.placement.slots != EMPTY).sum() - (placement.slots != EMPTY).sum())


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1.0, 1.1, 1.5]), st.sampled_from([1, 7, 1024]))
def test_plans_hold_every_promise(case, factor, least):
    loads, placement, width = case
    plan = fsep_llep(loads, placement, width, capacity_factor=factor, min_tokens_per_gemm=least)
    check_plan(plan, loads)
    above, below = factor.as_integer_ratio()
    highest = -(-above * int(loads.sum()) // (below * len(loads))) + least - 1
    assert plan.rank_loads.max() <= max(highest, 0)
    before = fsep(loads, placement, width)
    known = placement.slots.shape[1]
    foreseen = placement.slots != EMPTY
    assert (plan.placement.slots[:, :known][foreseen] == placement.slots[foreseen]).all()
    if before.rank_loads.max() <= highest:
        assert plan.digest() == before.digest()
        assert plan.spilled == 0
    # Every helper serves tokens, and these are what was spilled.
    quotas, late = plan.split.quotas(), set()
    spilled = 0
    for rank, slot, tokens in zip(plan.split.rank, plan.split.slot, quotas, strict=True):
        if slot >= known or placement.slots[rank, slot] == EMPTY:
            spilled += tokens
            late |= {(rank, slot)} if tokens else set()
    assert (spilled, len(late)) == (plan.spilled, helpers(plan, placement))
    # With these helpers no split has a lower maximum.
    assert plan.rank_loads.max() == lowest_maximum(loads.sum(axis=0), plan.placement.slots) or loads.max() > 10**9


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1.0, 1.1, 1.5]))
def test_hardly_more_helpers_than_the_fewest(case, factor):
    """HiGHS finds the fewest; one at a time is at most one more on these sizes."""
    loads, placement, width = case
    loads = loads // max(1, int(loads.max()) // 1000)
    plan = fsep_llep(loads, placement, width, capacity_factor=factor, min_tokens_per_gemm=1)
    above, below = factor.as_integer_ratio()
    highest = min(-(-above * int(loads.sum()) // (below * len(loads))), int(loads.sum()))
    fewest = fewest_fetches(loads.sum(axis=0), placement.slots, highest)
    assert fewest <= helpers(plan, placement) <= fewest + 1


def test_as_few_as_can_be_on_the_whole():
    """Within a twentieth of the fewest, by HiGHS, over many loads that no forecast knew; LLEP takes far more."""
    rng = np.random.default_rng(5)
    ours, fewest, chunks = 0, 0, 0
    for _ in range(60):
        ranks, experts = int(rng.integers(3, 7)), int(rng.integers(3, 9))
        loads = rng.multinomial(2000, rng.dirichlet(np.full(experts, 2.0)), ranks)
        placement = fsep_placement(rng.integers(1, 100, experts), ranks, -(-experts // ranks) + 1)
        plan = fsep_llep(loads, placement, min_tokens_per_gemm=1)
        ours += helpers(plan, placement)
        fewest += fewest_fetches(loads.sum(axis=0), placement.slots, -(-int(loads.sum()) // ranks))
        alone = llep(loads, chunk_owners(experts, ranks), min_tokens_per_gemm=1, imbalance_threshold=1.0)
        chunks += int((alone.placement.slots != EMPTY).sum()) - experts
    assert fewest <= ours <= 1.05 * fewest
    assert ours < 0.6 * chunks


def test_one_expert_levels_several_ranks():
    """Ranks 0 to 3 share expert 4 with nobody below; one copy of it on rank 4 takes load off all of them."""
    slots = np.array([[0, 4], [1, 4], [2, 4], [3, 4], [5, EMPTY]])
    loads = np.zeros((5, 6), np.int64)
    loads[0] = [50, 50, 50, 50, 300, 0]  # 125 on each of four ranks
    plan = fsep_llep(loads, Placement(slots), min_tokens_per_gemm=1)
    assert helpers(plan, Placement(slots)) == 1
    assert plan.rank_loads.tolist() == [100] * 5
    assert plan.placement.held_by(4).tolist() == [5, 4]


def test_room_is_reached_by_way_of_others():
    """A chain: rank 1 can make room for 60 tokens by handing its own on to rank 2, which hands on to rank 3."""
    slots = np.array([[0, EMPTY], [1, 2], [2, 3], [3, EMPTY]])
    loads = np.zeros((4, 4), np.int64)
    loads[0] = [160, 60, 60, 40]  # the mean is 80
    plan = fsep_llep(loads, Placement(slots), min_tokens_per_gemm=1)
    assert helpers(plan, Placement(slots)) == 1
    assert plan.rank_loads.tolist() == [80] * 4


def test_of_as_many_helpers_those_that_level_most():
    """Nearly twice the mean is allowed, for which the neighbour would do; a rank further off has more room."""
    slots, loads = np.array([[0], [1], [2], [3]]), np.zeros((4, 4), np.int64)
    loads[0] = [160, 60, 20, 80]
    plan = fsep_llep(loads, Placement(slots), 2, capacity_factor=1.9, min_tokens_per_gemm=1)
    assert helpers(plan, Placement(slots)) == 1
    assert plan.rank_loads.tolist() == [90, 60, 90, 80]


def test_helpers_on_the_own_node_come_first():
    slots = np.array([[0], [1], [2], [3]])
    loads = np.zeros((4, 4), np.int64)
    loads[0] = [20, 20, 140, 20]  # the mean is 50, and any other rank has 30 of room
    for width, best in ((2, 3), (4, 0)):
        plan = fsep_llep(loads, Placement(slots), width, capacity_factor=2.2, min_tokens_per_gemm=1)
        assert np.flatnonzero((plan.placement.slots == 2).any(axis=1)).tolist() == sorted({2, best})


def test_many_helpers_are_no_more_than_are_needed():
    """Every token goes to four experts: each rank without one of them has to fetch one, and few fetch a second."""
    ranks, experts = 200, 40
    totals = np.full(experts, 3)
    totals[:4] = 100_000
    loads = totals // ranks + (np.arange(ranks)[:, None] < totals % ranks)
    placement = fsep_placement(np.roll(totals, 20), ranks, 1, 8)
    plan = fsep_llep(loads, placement, 8, min_tokens_per_gemm=1)
    check_plan(plan, loads)
    assert plan.rank_loads.max() <= -(-loads.sum() // ranks)
    without = ranks - int(np.isin(placement.slots, range(4)).sum())
    assert without <= helpers(plan, placement) <= 1.02 * without
