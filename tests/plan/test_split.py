"""The exact split: optimal to the token by HiGHS, local where it can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import Placement, exact_split, fsdp, fsep, initial_placement, laer_placement, traffic
from tests.plan.oracles import (
    check_own_tokens_first,
    check_plan,
    every_slot_serves_its_ranges,
    fewest_leavers,
    lowest_maximum,
    stays_home,
)


@st.composite
def cases(draw):
    ranks, experts = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    slots = draw(st.integers(-(-experts // ranks), experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = rng.integers(0, draw(st.sampled_from([2, 30, 1000])), (ranks, experts)) * rng.integers(0, 5, experts)
    if draw(st.booleans()):
        return loads, initial_placement(experts, ranks, slots)
    return loads, laer_placement(rng.integers(0, 100, experts), ranks, slots)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([None, 2, 3]))
def test_no_split_has_a_lower_maximum(case, width):
    loads, placement = case
    plan = fsep(loads, placement, width)
    check_plan(plan, loads)
    assert every_slot_serves_its_ranges(plan)
    check_own_tokens_first(plan, loads)
    assert plan.rank_loads.max() == lowest_maximum(loads.sum(axis=0), placement.slots)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 2, 3]), st.sampled_from([0, 3]))
def test_of_the_best_splits_one_with_least_traffic(case, width, slack):
    """HiGHS finds none with fewer tokens that leave their node."""
    loads, placement = case
    split = exact_split(loads, placement, width, slack=slack)
    highest = int(split.rank_loads(len(loads)).max())
    if width < len(loads):
        best = fewest_leavers(loads, placement.slots, width, max(highest, -(-int(loads.sum()) // len(loads)) + slack))
        leaving = traffic(loads, split, width, 1).foreign_nodes
        assert leaving == best


def test_optimal_where_many_paths_are_needed():
    """A chain of ranks that share one expert with each neighbour: all load enters at one end."""
    ranks = 12
    slots = np.array([[rank, rank + 1] for rank in range(ranks)])
    loads = np.zeros((ranks, ranks + 1), np.int64)
    loads[0] = 7
    loads[0, 0] = 100
    plan = fsep(loads, Placement(slots))
    check_plan(plan, loads)
    assert plan.rank_loads.max() == lowest_maximum(loads.sum(axis=0), slots)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 20))
def test_slack_is_kept(case, slack):
    loads, placement = case
    best = exact_split(loads, placement).rank_loads(len(loads)).max()
    loose = fsep(loads, placement, slack=slack).rank_loads
    assert best <= loose.max() <= best + slack


def test_with_every_expert_everywhere_and_even_sources_nothing_moves():
    loads = np.full((4, 6), 5)
    placement = fsdp(loads).placement
    plan = fsep(loads, placement)
    assert stays_home(plan, loads) == loads.sum()


def test_foreign_tokens_move_before_local_ones():
    loads = np.array([[10, 0], [10, 0], [0, 10]])
    placement = Placement(np.array([[0, -1], [0, 1], [1, -1]]))
    plan = fsep(loads, placement)
    assert stays_home(plan, loads) == 30


def test_the_own_node_comes_before_others():
    loads = np.zeros((4, 1), np.int64)
    loads[1, 0] = loads[2, 0] = 10
    placement = Placement(np.array([[0], [-1], [-1], [0]]))
    assert exact_split(loads, placement, 2).end.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1]], "shape"),
        ([[0, 1], [1, 9]], "9"),
        ([[0, 1], [1, 1]], "more than one slot"),
        ([[0, -1], [0, -1]], "expert 1 has 2 tokens"),
    ],
)
def test_bad_placements_name_the_numbers(slots, message):
    with pytest.raises(ValueError, match=message):
        exact_split(np.ones((2, 2), np.int64), Placement(np.array(slots)))
    with pytest.raises(ValueError, match="slack=-1"):
        exact_split(np.ones((1, 1), np.int64), Placement(np.array([[0]])), slack=-1)


def test_an_expert_without_tokens_needs_no_replica():
    loads = np.array([[4, 0], [4, 0]])
    plan = fsep(loads, Placement(np.array([[0], [0]])))
    check_plan(plan, loads)


def test_huge_counts_stay_exact():
    """B53: 3e9 tokens per rank and expert."""
    loads = np.full((8, 16), 3_000_000_000)
    loads[:, 0] *= 7
    plan = fsep(loads, laer_placement(loads, 8, 4))
    check_plan(plan, loads)
    assert plan.rank_loads.max() - plan.rank_loads.min() <= 1
