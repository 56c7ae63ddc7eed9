"""From quotas to ranges of each expert's stream: tokens stay on their rank, then on their node, as far as may be."""

from __future__ import annotations

import numpy as np

from ._jit import kernel


@kernel
def stream_ranges(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A split's first, rank, slot and end: a replica once per range that it serves, none if it serves none.

    A rank's tokens go to its own replica up to its quota; what is left of them to the replicas of its node, in rank
    order, as far as these have quota left beside their own ranks' tokens; and then to replicas elsewhere.

    Args:
        loads: int64 ``[N, E]``.
        first: int64 ``[E + 1]``; with ``rank``, ``slot`` and ``quota`` ``[R]`` the replicas, by expert and in rank
            order; an expert's quotas sum to its tokens.
        width: Ranks of a node.
    """
    ranks, experts = loads.shape
    # A range ends where a replica's own, near or far part does, or a source's tokens do.
    room = 3 * len(rank) + ranks * experts
    rank_of, slot_of, end = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranges = np.zeros(experts + 1, np.int64)
    own, near, far = quota.copy(), np.zeros_like(quota), np.zeros_like(quota)
    count, of_expert = 0, np.ascontiguousarray(loads.T)
    for expert in range(experts):
        start, stop, sent = first[expert], first[expert + 1], of_expert[expert]
        if stop - start == 1:
            rank_of[count], slot_of[count], end[count] = rank[start], slot[start], quota[start]
            count += 1
        elif stop > start:
            _share(sent, rank, start, stop, width, own, near, far)
            after, close, away, begin = start, start, start, 0
            node_stop = 0
            for source in range(ranks):
                if source == node_stop:
                    # A node begins: its first replica.
                    node_stop += width
                    while close < stop and rank[close] < source:
                        close += 1
                tokens = sent[source]
                while after < stop and rank[after] < source:
                    after += 1
                if after < stop and rank[after] == source:
                    begin, tokens = begin + own[after], tokens - own[after]
                    count = emit(rank_of, slot_of, end, count, ranges[expert], source, slot[after], own[after], begin)
                while tokens > 0:
                    while close < stop and rank[close] < node_stop and near[close] == 0:
                        close += 1
                    here = close < stop and rank[close] < node_stop
                    while not here and far[away] == 0:
                        away += 1
                    at, left = (close, near) if here else (away, far)
                    take = min(tokens, left[at])
                    left[at] -= take
                    begin, tokens = begin + take, tokens - take
                    count = emit(rank_of, slot_of, end, count, ranges[expert], rank[at], slot[at], take, begin)
        ranges[expert + 1] = count
    return ranges, rank_of[:count].copy(), slot_of[:count].copy(), end[:count].copy()


@kernel
def _share(
    sent: np.ndarray,
    rank: np.ndarray,
    start: int,
    stop: int,
    width: int,
    own: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    """Parts the quotas (in ``own``) of one expert's replicas: for their own rank, their node's others, and the rest.

    ``sent`` is int64 ``[N]``, the expert's tokens of each rank.
    """
    at = start
    while at < stop:
        node, before = rank[at] // width, at
        left = sent[node * width : (node + 1) * width].sum()
        while at < stop and rank[at] // width == node:
            near[at] = max(own[at] - sent[rank[at]], 0)
            own[at] -= near[at]
            left -= own[at]
            at += 1
        for here in range(before, at):
            over = max(near[here] - left, 0)
            near[here] -= over
            far[here] = over
            left -= near[here]


@kernel
def ends(first: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """int64 ``[R]``: where each replica's range of its expert's stream ends if it serves ``quota`` tokens."""
    end = quota.copy()
    for expert in range(len(first) - 1):
        for at in range(first[expert] + 1, first[expert + 1]):
            end[at] += end[at - 1]
    return end


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
