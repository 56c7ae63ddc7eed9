"""Splits that follow a rule instead of solving for the loads: even shares, LAER's own-node shares, own copy
first.

A rule that looks at the source can give a replica several ranges of its expert's stream: the split then lists
the replica once per range. The simulator and the cost model read such splits; the engine's own strategies
never make one.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .network import index_replicas
from .ranges import emit
from .split import check_homes
from .types import Placement, Plan, Split
from .validate import check_loads, check_owners, check_placement, node_width


def even_split(loads: np.ndarray, placement: Placement) -> Split:
    """Each replica of an expert serves the same number of its tokens, to within one.

    Raises:
        ValueError: Bad loads or placement, or an expert with tokens that no rank holds.
    """
    loads, slots = _checked(loads, placement)
    first, rank, slot, _ = index_replicas(slots, loads.shape[1])
    return Split(first, rank, slot, _even_ends(loads.sum(axis=0), first))


def laer(loads: np.ndarray, placement: Placement, ranks_per_node: int | None = None) -> Plan:
    """LAER's dispatch over a given placement (LAER-MoE, arXiv 2602.11686): own node first, even shares.

    Replicas on the source's node share its tokens evenly; only where there is none do all replicas.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        placement: From :func:`laer_placement`, made of earlier loads.
        ranks_per_node: Consecutive ranks that share a node; ``None`` means one node.

    Raises:
        ValueError: Bad loads or placement, or an expert with tokens that no rank holds.
    """
    loads, slots = _checked(loads, placement)
    first, rank, slot, _ = index_replicas(slots, loads.shape[1])
    return Plan(placement, Split(*_node_shares(loads, first, rank, slot, node_width(ranks_per_node, len(loads)))))


def own_copy_first(loads: np.ndarray, placement: Placement, owners: np.ndarray) -> Plan:
    """A source that holds a copy of the expert computes its own tokens, all others go to the owner.

    The split of FasterMoE's shadows and Prophet's partial copies. ``spilled`` counts tokens off their owner.

    Raises:
        ValueError: Bad loads, owners or placement, or an owner that does not hold its expert.
    """
    loads, slots = _checked(loads, placement)
    owners = check_owners(owners, *loads.shape)
    first, rank, slot, _ = index_replicas(slots, loads.shape[1])
    *parts, spilled, lost = _own_shares(loads, first, rank, slot, owners)
    if lost >= 0:
        raise ValueError(f"rank {owners[lost]} owns expert {lost} but does not hold it")
    return Plan(placement, Split(*parts), spilled=int(spilled))


def _checked(loads: np.ndarray, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    loads = check_loads(loads)
    slots = check_placement(placement, *loads.shape)
    held = np.zeros(loads.shape[1] + 1, np.bool_)
    held[slots.ravel()] = True  # EMPTY marks the extra last entry
    homeless = np.flatnonzero((loads.sum(axis=0) > 0) & ~held[:-1])
    check_homes(loads, int(homeless[0]) if len(homeless) else -1)
    return loads, slots


@kernel
def _even_ends(totals: np.ndarray, first: np.ndarray) -> np.ndarray:
    end = np.empty(first[-1], np.int64)
    for expert in range(len(totals)):
        start, copies = first[expert], first[expert + 1] - first[expert]
        for at in range(copies):
            end[start + at] = _share(totals[expert], at + 1, copies)
    return end


@kernel
def _share(tokens: int, part: int, parts: int) -> int:
    """``tokens * part // parts`` without a product that could leave int64."""
    return tokens // parts * part + tokens % parts * part // parts


@kernel
def _node_shares(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ranks, experts = loads.shape
    nodes = -(-ranks // width)
    room = len(rank) * nodes  # each range of a node's tokens over all replicas, at worst
    rank_of, slot_of, end = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranges = np.zeros(experts + 1, np.int64)
    count = 0
    for expert in range(experts):
        begin = 0
        after = first[expert]
        for node in range(nodes):
            tokens = loads[node * width : (node + 1) * width, expert].sum()
            start = after
            while after < first[expert + 1] and rank[after] // width == node:
                after += 1
            low, high = (start, after) if after > start else (first[expert], first[expert + 1])
            for at in range(low, high if tokens > 0 else low):
                stop = begin + _share(tokens, at + 1 - low, high - low)
                count = emit(rank_of, slot_of, end, count, ranges[expert], rank[at], slot[at], tokens, stop)
            begin += tokens
        ranges[expert + 1] = count
    return ranges, rank_of[:count].copy(), slot_of[:count].copy(), end[:count].copy()


@kernel
def _own_shares(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Ranges per expert; tokens off their owner; an expert that its owner does not hold, or -1."""
    ranks, experts = loads.shape
    room = 2 * len(rank) + experts
    rank_of, slot_of, end = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranges = np.zeros(experts + 1, np.int64)
    count, spilled, lost = 0, 0, -1
    for expert in range(experts):
        owner_at = -1
        for at in range(first[expert], first[expert + 1]):
            if rank[at] == owners[expert]:
                owner_at = at
        if owner_at < 0:
            lost = expert
            break
        begin = 0
        own = first[expert]
        for source in range(ranks):
            tokens = loads[source, expert]
            while own < first[expert + 1] and rank[own] < source:
                own += 1
            at = own if own < first[expert + 1] and rank[own] == source else owner_at
            begin += tokens
            if at != owner_at:
                spilled += tokens
            count = emit(rank_of, slot_of, end, count, ranges[expert], rank[at], slot[at], tokens, begin)
        ranges[expert + 1] = count
    return ranges, rank_of[:count].copy(), slot_of[:count].copy(), end[:count].copy(), spilled, lost
