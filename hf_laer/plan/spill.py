"""Predict, then correct: the exact split over a predicted placement, then spill what it could not level.

Where recent loads misled the placement, some ranks hold experts that no other rank can take over. Those spill, as in
LLEP (arXiv 2601.17111) with the expert's weights, but not chunk by chunk: as few experts are fetched as let all ranks
come down (see :mod:`.helpers`), and the tokens are split exactly over the placement and these.
"""

from __future__ import annotations

import math

import numpy as np

from ._jit import kernel
from .cost import CostModel
from .guard import cheapest
from .helpers import fewest_helpers
from .network import Network, network
from .ranges import stream_ranges
from .split import check_homes, level_exactly
from .types import EMPTY, Placement, Plan, Split
from .validate import check_loads, check_placement, node_width

# How often the distance between the mean and the highest load allowed is halved, to level further with as many helpers.
HALVINGS = 4

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def fsep_llep(
    loads: np.ndarray,
    placement: Placement,
    ranks_per_node: int | None = None,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    cost: CostModel | None = None,
) -> Plan:
    """FSEP's placement (arXiv 2602.11686), the exact split, then LLEP's spill (arXiv 2601.17111) of the rest.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        placement: Made of earlier loads.
        ranks_per_node: Helpers on the same node come first; ``None`` means one node.
        capacity_factor: A rank's capacity as a multiple of the mean load.
        min_tokens_per_gemm: m, how many tokens a transfer of an expert must be worth: a rank that exceeds its capacity
            by less is left as it is.
        cost: If given, a plan that spills, and is not predicted to take less time than :func:`fsep`'s, is replaced
            by it: what is spilled must gain more than its weights cost.

    Returns:
        A plan whose slot rows list the placement's experts, then those spilled in; loads stay at or below
        ``ceil(alpha * mean) + m - 1``. ``spilled`` counts tokens that moved to slots the placement did not
        foresee.

    Raises:
        ValueError: As :func:`exact_split`, or a capacity factor or m below 1.
    """
    level, plan = level_and_spilled(
        loads,
        placement,
        ranks_per_node,
        capacity_factor=capacity_factor,
        min_tokens_per_gemm=min_tokens_per_gemm,
    )
    if cost is None or plan is level:
        return plan
    return cheapest((level, plan), loads, cost, home="sharded", foreseen=placement)


def level_and_spilled(
    loads: np.ndarray,
    placement: Placement,
    ranks_per_node: int | None,
    *,
    capacity_factor: float,
    min_tokens_per_gemm: int,
    halvings: int = HALVINGS,
) -> tuple[Plan, Plan]:
    """The exact split's plan, and the one that spills what that leaves; the same one twice where nothing is left.

    For arguments and errors see :func:`fsep_llep`, for ``halvings`` :func:`fewest_helpers`.
    """
    if not (math.isfinite(capacity_factor) and capacity_factor >= 1) or min_tokens_per_gemm < 1:
        raise ValueError(f"capacity_factor={capacity_factor} and min_tokens_per_gemm={min_tokens_per_gemm}: at least 1")
    loads = check_loads(loads)
    slots = check_placement(placement, *loads.shape)
    width = node_width(ranks_per_node, len(loads))
    total = int(loads.sum())
    above, below = float(capacity_factor).as_integer_ratio()
    capacity = min(-(-above * total // (below * len(loads))), total)
    least = min(int(min_tokens_per_gemm), max(total, 1))
    table, plain, full, spilled, homeless = _solve(loads, slots, width, capacity, least, halvings)
    check_homes(loads, homeless)
    level = Plan(placement, Split(*plain))
    return level, Plan(Placement(table), Split(*full), spilled=int(spilled)) if spilled else level


@kernel
def _solve(
    loads: np.ndarray, slots: np.ndarray, width: int, capacity: int, least: int, halvings: int
) -> tuple[np.ndarray, Parts, Parts, int, int]:
    """The slot table with what was fetched, the exact split's first, rank, slot and end, and the one over both;
    tokens in slots that were not foreseen; an expert that has tokens but no replica (or -1).
    """
    net, homeless = network(loads, slots, width)
    if homeless >= 0:
        parts = net.first, net.rank, net.slot, net.quota
        return slots, parts, parts, 0, homeless
    level_exactly(net, loads, 0)
    plain = stream_ranges(loads, net.first, net.rank, net.slot, net.quota, width)
    if net.held.max() < capacity + least:
        return slots, plain, plain, 0, -1
    mean = -(-net.held.sum() // len(net.held))
    expert, rank = fewest_helpers(net, mean, capacity + least - 1, halvings)
    while True:
        table = _with_helpers(slots, expert, rank)
        more, _ = network(loads, table, width)
        level_exactly(more, loads, 0)
        tokens = _served(more, expert, rank)
        if tokens.all():
            break
        expert, rank = expert[tokens > 0], rank[tokens > 0]
    return table, plain, stream_ranges(loads, more.first, more.rank, more.slot, more.quota, width), tokens.sum(), -1


@kernel
def _with_helpers(slots: np.ndarray, expert: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The slot table with each helper's expert behind its rank's others."""
    used = np.zeros(len(slots), np.int64)
    for holder in range(len(slots)):
        for slot in range(slots.shape[1]):
            used[holder] += slots[holder, slot] != EMPTY
    filled = used.copy()
    for helper in rank:
        filled[helper] += 1
    table = np.full((len(slots), max(filled.max(), slots.shape[1])), EMPTY, np.int64)
    table[:, : slots.shape[1]] = slots
    for at in range(len(rank)):
        table[rank[at], used[rank[at]]] = expert[at]
        used[rank[at]] += 1
    return table


@kernel
def _served(net: Network, expert: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """int64 ``[C]``: tokens that each helper serves."""
    tokens = np.zeros(len(expert), np.int64)
    for helper in range(len(expert)):
        for at in range(net.first[expert[helper]], net.first[expert[helper] + 1]):
            if net.rank[at] == rank[helper]:
                tokens[helper] = net.quota[at]
    return tokens
