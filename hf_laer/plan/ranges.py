"""From quotas to ranges of each expert's stream: tokens stay on their node as far as the quotas let them."""

from __future__ import annotations

import numpy as np

from ._jit import kernel


@kernel
def stream_ranges(
    sent: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A split's first, rank, slot and end: in rank order on one node, by :func:`_node_ranges` on several.

    ``sent`` is int64 ``[nodes, E]``, the tokens of each node's ranks; the quotas of an expert sum to its tokens.
    """
    if len(sent) > 1:
        return _node_ranges(sent, first, rank, slot, quota, width)
    return first, rank, slot, ends(first, quota)


@kernel
def ends(first: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """int64 ``[R]``: where each replica's range of its expert's stream ends if it serves ``quota`` tokens."""
    end = quota.copy()
    for expert in range(len(first) - 1):
        for at in range(first[expert] + 1, first[expert + 1]):
            end[at] += end[at - 1]
    return end


@kernel
def _node_ranges(
    sent: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A replica once per range that it serves, none if it serves none.

    A node's tokens go to its own replicas, in rank order, up to their quotas; what is left of them goes to the
    replicas elsewhere that have quota left.
    """
    nodes, experts = sent.shape
    room = 2 * len(rank) + nodes * experts
    rank_of, slot_of, end = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranges = np.zeros(experts + 1, np.int64)
    home, left, rest = quota.copy(), np.empty_like(quota), np.empty(nodes, np.int64)
    count = 0
    for expert in range(experts):
        start, stop = first[expert], first[expert + 1]
        for node in range(nodes):
            rest[node] = sent[node, expert]
        for at in range(start, stop):
            home[at] = min(rest[rank[at] // width], quota[at])
            left[at] = quota[at] - home[at]
            rest[rank[at] // width] -= home[at]
        begin, after, away = 0, start, start
        for node in range(nodes):
            while after < stop and rank[after] // width == node:
                begin += home[after]
                count = emit(rank_of, slot_of, end, count, ranges[expert], rank[after], slot[after], home[after], begin)
                after += 1
            while rest[node] > 0:
                while left[away] == 0:
                    away += 1
                take = min(rest[node], left[away])
                rest[node] -= take
                left[away] -= take
                begin += take
                count = emit(rank_of, slot_of, end, count, ranges[expert], rank[away], slot[away], take, begin)
        ranges[expert + 1] = count
    return ranges, rank_of[:count].copy(), slot_of[:count].copy(), end[:count].copy()


@kernel
def emit(
    rank_of: np.ndarray,
    slot_of: np.ndarray,
    end: np.ndarray,
    count: int,
    start: int,
    rank: int,
    slot: int,
    tokens: int,
    stop: int,
) -> int:
    """Appends a range that ends at ``stop``, or lengthens the last one of the same replica; the new count.

    ``start`` is where the expert's ranges begin; a range of no ``tokens`` is left out.
    """
    if tokens == 0:
        return count
    if count > start and rank_of[count - 1] == rank:
        end[count - 1] = stop
        return count
    rank_of[count], slot_of[count], end[count] = rank, slot, stop
    return count + 1
