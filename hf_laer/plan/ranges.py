"""From quotas to ranges of each expert's stream: tokens stay on their node as far as the quotas let them."""

from __future__ import annotations

import numpy as np

from ._jit import kernel


@kernel
def node_ranges(
    by_node: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """first ``[E + 1]``, rank, slot, end ``[R']``: a replica once per range that it serves, none if it serves none.

    A node's tokens go to its own replicas, in rank order, up to their quotas; what is left of them goes to the
    replicas elsewhere that have quota left. ``by_node`` is int64 ``[nodes, E]``, nodes are ``width`` ranks; the
    quotas of an expert sum to its tokens.
    """
    nodes, experts = by_node.shape
    room = 2 * len(rank) + nodes * experts
    rank_of, slot_of, end = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranges = np.zeros(experts + 1, np.int64)
    left, quota = quota.copy(), quota.copy()
    count = 0
    for expert in range(experts):
        start, stop = first[expert], first[expert + 1]
        rest = _take_home(by_node[:, expert], left, rank, start, stop, width)
        begin, after, away = 0, start, start
        for node in range(nodes):
            while after < stop and rank[after] // width == node:
                home = quota[after] - left[after]
                begin += home
                count = _emit(rank_of, slot_of, end, count, ranges[expert], rank[after], slot[after], home, begin)
                after += 1
            while rest[node] > 0:
                while left[away] == 0:
                    away += 1
                take = min(rest[node], left[away])
                rest[node] -= take
                left[away] -= take
                quota[away] -= take  # so that a later node's home share is not counted twice
                begin += take
                count = _emit(rank_of, slot_of, end, count, ranges[expert], rank[away], slot[away], take, begin)
        ranges[expert + 1] = count
    return ranges, rank_of[:count].copy(), slot_of[:count].copy(), end[:count].copy()


@kernel
def _take_home(tokens: np.ndarray, left: np.ndarray, rank: np.ndarray, start: int, stop: int, width: int) -> np.ndarray:
    """Takes off ``left`` what each replica serves of its own node; the nodes' tokens that are left over."""
    rest = tokens.copy()
    for at in range(start, stop):
        home = min(rest[rank[at] // width], left[at])
        rest[rank[at] // width] -= home
        left[at] -= home
    return rest


@kernel
def _emit(
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
    """Appends a range that ends at ``stop``, or lengthens the last one of the same replica; the new count."""
    if tokens == 0:
        return count
    if count > start and rank_of[count - 1] == rank:
        end[count - 1] = stop
        return count
    rank_of[count], slot_of[count], end[count] = rank, slot, stop
    return count + 1
