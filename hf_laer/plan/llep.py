"""LLEP: owners compute up to a capacity, the rest spills to the least loaded ranks (arXiv 2601.17111).

The published algorithm, LLA with its helper LLAS, has corners which this one avoids:

- The capacity is rounded up, so that the ranks together always have room for every token.
- A rank may exceed its capacity by less than ``min_tokens_per_gemm``: that many tokens cost less than sending
  an expert's weights to another rank. As room for one token is then room for a chunk, no remainder is ever
  left over to be dumped on one rank, and a chunk that does not finish its expert fills its helper: no rank
  helps an expert twice.
"""

from __future__ import annotations

import math

import numpy as np

from ._jit import kernel
from .cost import CostModel, predict
from .fixed import ep
from .guard import no_worse_than_ep
from .order import descending
from .owners import owner_slots
from .types import Placement, Plan, Split
from .validate import check_loads, check_owners, node_width


def llep(
    loads: np.ndarray,
    owners: np.ndarray,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    imbalance_threshold: float = 1.3,
    ranks_per_node: int | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """Least-loaded expert parallelism: spill what exceeds an owner's capacity (LLEP, arXiv 2601.17111).

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``, the rank that owns each expert.
        capacity_factor: Alpha; a rank's capacity is ``ceil(alpha * total / N)`` tokens.
        min_tokens_per_gemm: m; smaller chunks are not worth a weight transfer.
        imbalance_threshold: Lambda; while max/mean over ranks is below it, the plan is :func:`ep`'s.
        ranks_per_node: Helpers on the owner's node come first; ``None`` means one node.
        cost: If given, plans carry a prediction, and one that is predicted slower than :func:`ep` is
            replaced by it: spilling does not pay where batches are small.

    Returns:
        A plan whose slot rows list the rank's own experts ascending (also those without a token), then those
        it helps with. Loads stay at or below capacity + m - 1. ``spilled`` counts tokens computed away from
        their owner. Replicas of one expert are in rank order, which leaves many tokens on their source rank.

    Raises:
        ValueError: Bad loads or owners, alpha or lambda below 1, or m below 1.
    """
    for name, value in (("capacity_factor", capacity_factor), ("imbalance_threshold", imbalance_threshold)):
        if not (math.isfinite(value) and value >= 1):
            raise ValueError(f"{name}={value} must be a finite number of at least 1")
    if min_tokens_per_gemm < 1:
        raise ValueError(f"min_tokens_per_gemm={min_tokens_per_gemm} must be at least 1")
    loads = check_loads(loads)
    ranks, experts = loads.shape
    owners = check_owners(owners, ranks, experts)
    width = node_width(ranks_per_node, ranks)
    totals = loads.sum(axis=0)
    native = _native_loads(totals, owners, ranks)
    total, hottest = int(native.sum()), int(native.max())
    # Fractions of whole numbers: every rank rounds alike.
    above, below = float(imbalance_threshold).as_integer_ratio()
    plain = ep(loads, owners)
    if cost is not None:
        plain = predict(plain, loads, cost, home="whole", owners=owners)
    if hottest * ranks * below < above * total:
        return plain
    above, below = float(capacity_factor).as_integer_ratio()
    capacity = min(-(-above * total // (below * ranks)), total)
    if hottest < capacity + min_tokens_per_gemm:
        return plain
    chunks = _spill(totals, native, owners, capacity, min(int(min_tokens_per_gemm), max(total, 1)), width)
    slots, *parts = _assemble(totals, owners, ranks, *chunks)
    plan = Plan(Placement(slots), Split(*parts), spilled=int(chunks[2].sum()))
    return plan if cost is None else no_worse_than_ep(plan, loads, owners, cost, home="whole")


@kernel
def _native_loads(totals: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    """Tokens that the experts of each rank get, int64 ``[N]``."""
    native = np.zeros(ranks, np.int64)
    for expert in range(len(owners)):
        native[owners[expert]] += totals[expert]
    return native


@kernel
def _spill(
    totals: np.ndarray, native: np.ndarray, owners: np.ndarray, capacity: int, least: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The chunks that leave their owner: expert, helper rank and tokens, each int64 ``[C]``.

    ``load`` holds what a rank has been given plus what still pends on it as an owner, so helping never pushes
    out a rank's own experts later.
    """
    load = native.copy()
    limit = capacity + least - 1
    hot = np.empty(len(owners), np.int64)  # the experts of other owners all stay
    sizes = np.empty(len(owners), np.int64)
    found = 0
    for expert in range(len(owners)):
        if load[owners[expert]] > limit:
            hot[found], sizes[found] = expert, totals[expert]
            found += 1
    room_for = found + len(load)  # a chunk finishes an expert or fills a rank
    expert_of = np.empty(room_for, np.int64)
    helper_of = np.empty(room_for, np.int64)
    tokens_of = np.empty(room_for, np.int64)
    count = 0
    for at in descending(sizes[:found]):
        expert = hot[at]
        owner = owners[expert]
        if load[owner] <= limit:
            continue
        rest = min(totals[expert], load[owner] - capacity)
        load[owner] -= rest
        while rest > 0:
            if rest < least and load[owner] + rest <= limit:
                load[owner] += rest  # the owner takes what is not worth a transfer
                break
            helper = _helper(load, owner, capacity - min(rest, least), capacity, width)
            room = capacity - load[helper]
            take = rest if rest < room + least else max(room, least)
            expert_of[count], helper_of[count], tokens_of[count] = expert, helper, take
            count += 1
            load[helper] += take
            rest -= take
    return expert_of[:count], helper_of[:count], tokens_of[:count]


@kernel
def _helper(load: np.ndarray, owner: int, near_limit: int, capacity: int, width: int) -> int:
    """The least loaded rank of the owner's node if its load is within ``near_limit``, else of all ranks."""
    node = owner // width * width
    best = node
    for rank in range(node, min(node + width, len(load))):
        if load[rank] < load[best]:
            best = rank
    if load[best] <= near_limit and load[best] < capacity:
        return best
    best = 0
    for rank in range(len(load)):
        if load[rank] < load[best]:
            best = rank
    return best


@kernel
def _assemble(
    totals: np.ndarray,
    owners: np.ndarray,
    num_ranks: int,
    expert_of: np.ndarray,
    helper_of: np.ndarray,
    tokens_of: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot table and split (first, rank, slot, end) of owners and chunks, replicas of one expert in rank
    order.
    """
    experts = len(totals)
    helped = np.zeros(num_ranks, np.int64)
    first = np.zeros(experts + 1, np.int64)
    first[1:] = 1
    for chunk in range(len(expert_of)):
        helped[helper_of[chunk]] += 1
        first[expert_of[chunk] + 1] += 1
    first = np.cumsum(first)
    slots, slot_of = owner_slots(owners, num_ranks, helped)
    owned = _native_loads(np.ones_like(owners), owners, num_ranks)
    replicas = experts + len(expert_of)
    rank, slot, end = np.empty(replicas, np.int64), np.empty(replicas, np.int64), np.empty(replicas, np.int64)
    filled = first[:-1].copy()
    for expert in range(experts):
        rank[filled[expert]], slot[filled[expert]], end[filled[expert]] = (
            owners[expert],
            slot_of[expert],
            totals[expert],
        )
        filled[expert] += 1
    for chunk in descending(-expert_of):
        expert, helper = expert_of[chunk], helper_of[chunk]
        at = filled[expert]
        rank[at], slot[at], end[at] = helper, owned[helper], tokens_of[chunk]
        end[first[expert]] -= tokens_of[chunk]
        slots[helper, owned[helper]] = expert
        owned[helper] += 1
        filled[expert] += 1
    for expert in range(experts):
        _sort_by_rank(rank, slot, end, first[expert], first[expert + 1])
        for at in range(first[expert] + 1, first[expert + 1]):
            end[at] += end[at - 1]
    return slots, first, rank, slot, end


@kernel
def _sort_by_rank(rank: np.ndarray, slot: np.ndarray, tokens: np.ndarray, start: int, stop: int) -> None:
    """Insertion sort of one expert's few replicas."""
    for at in range(start + 1, stop):
        back = at
        while back > start and rank[back] < rank[back - 1]:
            for values in (rank, slot, tokens):
                values[back], values[back - 1] = values[back - 1], values[back]
            back -= 1
