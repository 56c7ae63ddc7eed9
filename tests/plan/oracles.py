"""Slow, plain references for the planners: written for clarity, checked against by the tests."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hf_laer.plan import EMPTY, Plan


def check_plan(plan: Plan, loads: np.ndarray) -> None:
    """Every token is routed once, to a slot that holds its expert; nothing is held twice on a rank."""
    ranks, experts = loads.shape
    slots, split = plan.placement.slots, plan.split
    assert slots.dtype == split.first.dtype == split.rank.dtype == split.slot.dtype == split.end.dtype == np.int64
    assert len(slots) == ranks
    assert len(split.first) == experts + 1
    for row in slots:
        filled = row[row != EMPTY]
        assert (row[len(filled) :] == EMPTY).all()
        assert len(set(filled)) == len(filled)
    for expert in range(experts):
        part = slice(split.first[expert], split.first[expert + 1])
        end = split.end[part]
        assert (np.diff(end, prepend=0) >= 0).all()
        assert (end[-1] if len(end) else 0) == loads[:, expert].sum()
        assert (slots[split.rank[part], split.slot[part]] == expert).all()
    assert plan.rank_loads.sum() == loads.sum()


def tokens_of(plan: Plan, loads: np.ndarray) -> dict[tuple[int, int, int], int]:
    """Tokens by source, expert and rank that computes them, followed position by position."""
    split, found = plan.split, {}
    for expert in range(loads.shape[1]):
        parts = range(split.first[expert], split.first[expert + 1])
        serves = np.repeat(split.rank[parts], np.diff(split.end[parts], prepend=0))
        for source, rank in zip(np.repeat(np.arange(len(loads)), loads[:, expert]), serves, strict=True):
            found[source, expert, rank] = found.get((source, expert, rank), 0) + 1
    return found


def check_own_tokens_first(plan: Plan, loads: np.ndarray) -> None:
    """Each replica serves its own rank's tokens before others'."""
    found, served = tokens_of(plan, loads), {}
    for (_, expert, rank), tokens in found.items():
        served[expert, rank] = served.get((expert, rank), 0) + tokens
    for (expert, rank), tokens in served.items():
        assert found.get((rank, expert, rank), 0) == min(tokens, loads[rank, expert])


def every_slot_serves_its_ranges(plan: Plan) -> bool:
    """Whether no replica is listed in a slot that is not filled."""
    return bool((plan.placement.slots[plan.split.rank, plan.split.slot] != EMPTY).all())


def one_replica_per_slot(plan: Plan) -> bool:
    """Whether replicas and filled slots are the same set."""
    taken = set(zip(plan.split.rank.tolist(), plan.split.slot.tolist(), strict=True))
    rank, slot = np.nonzero(plan.placement.slots != EMPTY)
    return taken == set(zip(rank.tolist(), slot.tolist(), strict=True)) and len(taken) == len(plan.split.rank)


def fewest_leavers(loads: np.ndarray, slots: np.ndarray, width: int, highest: int) -> int:
    """The fewest tokens that must leave their node if no rank may hold more than ``highest``, by HiGHS."""
    ranks, experts = loads.shape
    nodes = -(-ranks // width)
    pairs = [(rank, expert) for rank in range(ranks) for expert in slots[rank] if expert != EMPTY]
    size = nodes * len(pairs)
    cost = np.zeros(size)
    rows, low, high = [], [], []
    for node in range(nodes):
        tokens = loads[node * width : (node + 1) * width].sum(axis=0)
        for expert in range(experts):
            row = np.zeros(size)
            for at, (rank, held) in enumerate(pairs):
                cost[node * len(pairs) + at] = rank // width != node
                row[node * len(pairs) + at] = held == expert
            rows.append(row)
            low.append(tokens[expert])
            high.append(tokens[expert])
    for rank in range(ranks):
        rows.append(np.tile([float(holder == rank) for holder, _ in pairs], nodes))
        low.append(-np.inf)
        high.append(highest)
    result = milp(cost, constraints=LinearConstraint(np.array(rows), low, high), bounds=Bounds(0, np.inf))
    return round(result.fun)


def lowest_maximum(totals: np.ndarray, slots: np.ndarray) -> int:
    """The least possible load of the most loaded rank for a fixed placement: an integer programme, solved by
    HiGHS.
    """
    pairs = [(rank, expert) for rank in range(len(slots)) for expert in slots[rank] if expert != EMPTY]
    size = len(pairs) + 1
    rows, low, high = [], [], []
    for expert, total in enumerate(totals):
        row = np.zeros(size)
        row[[at for at, pair in enumerate(pairs) if pair[1] == expert]] = 1
        rows.append(row)
        low.append(total)
        high.append(total)
    for rank in range(len(slots)):
        row = np.zeros(size)
        row[[at for at, pair in enumerate(pairs) if pair[0] == rank]] = 1
        row[-1] = -1
        rows.append(row)
        low.append(-np.inf)
        high.append(0)
    cost = np.zeros(size)
    cost[-1] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.ones(size),
        bounds=Bounds(0, np.inf),
        options={"mip_rel_gap": 0},
    )
    return round(result.fun)


def fewest_fetches(totals: np.ndarray, slots: np.ndarray, highest: int) -> int:
    """The fewest experts to add to a slot table so that no rank need hold more than ``highest``, by HiGHS."""
    ranks, experts = len(slots), len(totals)
    size = 2 * ranks * experts  # tokens, then whether an expert is fetched
    held = np.array([[expert in slots[rank] for expert in range(experts)] for rank in range(ranks)])
    rows, low, high = [], [], []
    for expert in range(experts):
        row = np.zeros(size)
        row[expert : ranks * experts : experts] = 1
        rows.append(row)
        low.append(totals[expert])
        high.append(totals[expert])
    for rank in range(ranks):
        row = np.zeros(size)
        row[rank * experts : (rank + 1) * experts] = 1
        rows.append(row)
        low.append(-np.inf)
        high.append(highest)
        for expert in range(experts):
            row = np.zeros(size)
            row[rank * experts + expert] = 1
            row[ranks * experts + rank * experts + expert] = -float(totals[expert])
            rows.append(row)
            low.append(-np.inf)
            high.append(totals[expert] * held[rank, expert])
    cost, upper = np.repeat([0.0, 1.0], ranks * experts), np.full(size, np.inf)
    upper[ranks * experts :] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.repeat([0, 1], ranks * experts),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0},
    )
    return round(result.fun)


def best_placement(totals: np.ndarray, ranks: int, slots: int) -> float:
    """The lowest maximum over all placements with a free (fractional) split, by a mixed-integer programme."""
    experts = len(totals)
    tokens, held = np.arange(ranks * experts), ranks * experts + np.arange(ranks * experts)
    size = 2 * ranks * experts + 1
    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        low.append(least)
        high.append(most)

    for expert in range(experts):
        add({tokens[rank * experts + expert]: 1 for rank in range(ranks)}, totals[expert], totals[expert])
    for rank in range(ranks):
        mine = range(rank * experts, (rank + 1) * experts)
        add({tokens[at]: 1 for at in mine} | {size - 1: -1}, -np.inf, 0)
        add({held[at]: 1 for at in mine}, 0, slots)
        for expert in range(experts):
            at = rank * experts + expert
            add({tokens[at]: 1, held[at]: -float(totals[expert])}, -np.inf, 0)
    cost = np.zeros(size)
    cost[-1] = 1
    integral = np.zeros(size)
    integral[held] = 1
    upper = np.full(size, np.inf)
    upper[held] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=integral,
        bounds=Bounds(0, upper),
        options={"time_limit": 10},
    )
    return float(result.fun)


def stays_home(plan: Plan, loads: np.ndarray) -> int:
    """Tokens computed on their source rank."""
    starts = np.cumsum(loads, axis=0) - loads
    kept = 0
    for expert in range(loads.shape[1]):
        begin = 0
        for at in range(plan.split.first[expert], plan.split.first[expert + 1]):
            rank, end = plan.split.rank[at], plan.split.end[at]
            own = starts[rank, expert]
            kept += max(0, min(end, own + loads[rank, expert]) - max(begin, own))
            begin = end
    return int(kept)
