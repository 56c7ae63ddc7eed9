"""Predict, then correct: the exact split over a predicted placement, then spill what it could not level.

Where recent loads misled the placement, some ranks hold experts that no other rank can take over. Those spill
as in LLEP (arXiv 2601.17111): the excess of a rank goes, with the expert's weights, to the least loaded rank,
in its node first, in chunks worth a transfer.
"""

from __future__ import annotations

import math

import numpy as np

from ._jit import kernel
from .cost import CostModel, predict
from .order import descending
from .split import fsep, level_quotas, stream_ranges
from .types import EMPTY, Placement, Plan, Split
from .validate import check_loads, check_placement, node_width


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
        min_tokens_per_gemm: m, how many tokens a transfer of an expert must be worth: the gain exceeds the
            cost.

        cost: If given, plans carry a prediction, and one that is predicted slower than :func:`fsep`'s is
            replaced by it: what is spilled must gain more than its weights cost.

    Returns:
        A plan whose slot rows list the placement's experts, then those spilled in; loads stay at or below
        ``ceil(alpha * mean) + m - 1``. ``spilled`` counts tokens that moved to slots the placement did not
        foresee.

    Raises:
        ValueError: As :func:`exact_split`, or a capacity factor or m below 1.
    """
    if not (math.isfinite(capacity_factor) and capacity_factor >= 1) or min_tokens_per_gemm < 1:
        raise ValueError(f"capacity_factor={capacity_factor} and min_tokens_per_gemm={min_tokens_per_gemm}: at least 1")
    loads = check_loads(loads)
    slots = check_placement(placement, *loads.shape)
    width = node_width(ranks_per_node, len(loads))
    ranks, total = len(loads), int(loads.sum())
    above, below = float(capacity_factor).as_integer_ratio()
    capacity = min(-(-above * total // (below * ranks)), total)
    first, rank, slot, quota = level_quotas(loads, slots, width, 0, capacity)
    held = np.zeros(ranks, np.int64)
    np.add.at(held, rank, quota)
    least = min(int(min_tokens_per_gemm), max(total, 1))
    if int(held.max()) < capacity + least:
        level = Plan(placement, Split(*stream_ranges(loads, first, rank, slot, quota, width)))
        return level if cost is None else predict(level, loads, cost, home="sharded", foreseen=placement)
    expert_of = np.repeat(np.arange(loads.shape[1]), np.diff(first))
    moved = _spill(slots, expert_of, rank, quota, held, capacity, least, width)
    table, first, rank, slot, quota, spilled = _merge(slots, loads.shape[1], expert_of, rank, slot, quota, *moved)
    split = Split(*stream_ranges(loads, first, rank, slot, quota, width))
    plan = Plan(Placement(table), split, spilled=int(spilled))
    if cost is None:
        return plan
    plain, full = (
        predict(one, loads, cost, home="sharded", foreseen=placement)
        for one in (fsep(loads, placement, ranks_per_node), plan)
    )
    assert plain.predicted is not None
    assert full.predicted is not None
    return full if full.predicted.seconds < plain.predicted.seconds else plain


@kernel
def _spill(
    slots: np.ndarray,
    expert_of: np.ndarray,
    rank: np.ndarray,
    quota: np.ndarray,
    held: np.ndarray,
    capacity: int,
    least: int,
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Takes chunks off ``quota``; the chunks' expert, new rank and tokens.

    As in LLEP's own spill a chunk that does not finish a replica's excess fills its helper, and while a rank
    is above capacity another has room, so each round ends a replica or fills a rank.
    """
    room_for = len(rank) + len(held)
    experts, helpers = np.empty(room_for, np.int64), np.empty(room_for, np.int64)
    tokens = np.empty(room_for, np.int64)
    count = 0
    order = descending(quota)
    for at in order:
        giver = rank[at]
        if held[giver] < capacity + least:
            continue
        rest = min(quota[at], held[giver] - capacity)
        while rest > 0:
            if rest < least and held[giver] < capacity + least:
                break
            helper = _helper(held, giver, capacity, min(rest, least), width)
            room = capacity - held[helper]
            take = rest if rest < room + least else max(room, least)
            experts[count], helpers[count], tokens[count] = expert_of[at], helper, take
            count += 1
            held[helper] += take
            held[giver] -= take
            quota[at] -= take
            rest -= take
    return experts[:count], helpers[:count], tokens[:count]


@kernel
def _helper(held: np.ndarray, giver: int, capacity: int, wanted: int, width: int) -> int:
    """The least loaded rank of the giver's node if it has the room wanted, else of all ranks."""
    node = giver // width * width
    best = node
    for rank in range(node, min(node + width, len(held))):
        if held[rank] < held[best]:
            best = rank
    if held[best] + wanted <= capacity:
        return best
    best = 0
    for rank in range(len(held)):
        if held[rank] < held[best]:
            best = rank
    return best


@kernel
def _merge(
    slots: np.ndarray,
    experts: int,
    expert_of: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    quota: np.ndarray,
    chunk_expert: np.ndarray,
    chunk_rank: np.ndarray,
    chunk_tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Slot table with the spilled experts, first, rank, slot, quota, and the tokens in unforeseen slots."""
    ranks = slots.shape[0]
    tokens = np.zeros((ranks, experts), np.int64)
    slot_of = np.full((ranks, experts), EMPTY, np.int64)
    used = np.zeros(ranks, np.int64)
    for at in range(len(rank)):
        tokens[rank[at], expert_of[at]] = quota[at]
        slot_of[rank[at], expert_of[at]] = slot[at]
        used[rank[at]] += 1
    spilled = 0
    for chunk in range(len(chunk_expert)):
        helper, expert = chunk_rank[chunk], chunk_expert[chunk]
        if slot_of[helper, expert] == EMPTY:
            slot_of[helper, expert] = used[helper]
            used[helper] += 1
        if slot_of[helper, expert] >= slots.shape[1] or slots[helper, slot_of[helper, expert]] == EMPTY:
            spilled += chunk_tokens[chunk]
        tokens[helper, expert] += chunk_tokens[chunk]
    table = np.full((ranks, max(used.max(), slots.shape[1])), EMPTY, np.int64)
    replicas = used.sum()
    first = np.zeros(experts + 1, np.int64)
    new_rank, new_slot = np.empty(replicas, np.int64), np.empty(replicas, np.int64)
    new_quota = np.empty(replicas, np.int64)
    at = 0
    for expert in range(experts):
        for holder in range(ranks):
            if slot_of[holder, expert] != EMPTY:
                table[holder, slot_of[holder, expert]] = expert
                new_rank[at], new_slot[at] = holder, slot_of[holder, expert]
                new_quota[at] = tokens[holder, expert]
                at += 1
        first[expert + 1] = at
    return table, first, new_rank, new_slot, new_quota, spilled
