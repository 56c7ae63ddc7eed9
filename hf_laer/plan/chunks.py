"""Spilling: what a rank holds above its capacity goes, in chunks worth a transfer, to the least loaded ranks.

As LLEP does it (arXiv 2601.17111), without the corners of the published algorithm: a rank may exceed its capacity by
less than ``least`` tokens, which cost less than sending an expert's weights. As room for one token is then room for a
chunk, no remainder is ever left over to be dumped on one rank, and a chunk that does not finish its item fills its
helper: no rank helps an item twice.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .order import descending
from .types import EMPTY


@kernel
def chunks_above(
    rank: np.ndarray, quota: np.ndarray, held: np.ndarray, capacity: int, least: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Takes chunks off the items of ranks above ``capacity``, largest items first: item, helper and tokens, ``[C]``.

    Args:
        rank: int64 ``[R]``, where each item (an expert at its owner, or a replica) is.
        quota: int64 ``[R]``, its tokens; what leaves is taken off.
        held: int64 ``[N]``, tokens per rank, changed alike. What an item's own rank has still to give away counts
            there, so helping never pushes out a rank's own items later.
        capacity: Tokens that a rank may hold; ``N`` times it is at least their sum.
        least: Tokens that are worth a transfer.
        width: Ranks of a node; helpers there come first.
    """
    limit = capacity + least - 1
    hot, sizes = np.empty(len(rank), np.int64), np.empty(len(rank), np.int64)
    found = 0
    for at in range(len(rank)):
        if held[rank[at]] > limit and quota[at] > 0:  # items of other ranks all stay
            hot[found], sizes[found] = at, quota[at]
            found += 1
    room_for = found + len(held)  # a chunk finishes an item or fills a rank
    item, helpers, tokens = np.empty(room_for, np.int64), np.empty(room_for, np.int64), np.empty(room_for, np.int64)
    count = 0
    for largest in descending(sizes[:found]):
        at = hot[largest]
        giver = rank[at]
        rest = min(quota[at], held[giver] - capacity) if held[giver] > limit else 0
        while rest > 0 and not (rest < least and held[giver] <= limit):  # else the giver keeps it
            helper = _helper(held, giver, capacity, min(rest, least), width)
            room = capacity - held[helper]
            take = rest if rest < room + least else max(room, least)
            item[count], helpers[count], tokens[count] = at, helper, take
            count += 1
            held[helper] += take
            held[giver] -= take
            quota[at] -= take
            rest -= take
    return item[:count], helpers[:count], tokens[:count]


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
def add_chunks(
    slots: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    quota: np.ndarray,
    expert: np.ndarray,
    helper: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Gives chunks to their helpers: a slot table, first, rank, slot and quota, and the tokens in new slots.

    A helper that holds the expert already serves the chunk from that slot; else it gets a slot after its others.
    Replicas stay by expert and in rank order.

    Args:
        slots: int64 ``[N, S]``.
        first: int64 ``[E + 1]``; with ``rank``, ``slot`` and ``quota`` ``[R]`` the replicas so far.
        expert: int64 ``[C]``; with ``helper`` and ``tokens`` the chunks.
    """
    start, rank, slot, quota = _lined_up(first, rank, slot, quota, expert, helper, tokens)
    used = np.zeros(len(slots), np.int64)
    for at in range(len(rank)):
        used[rank[at]] += 1 if slot[at] != EMPTY else 0
    merged, spilled = _merge(start, rank, slot, quota, used, slots)
    count = merged[-1]
    table = np.full((len(slots), max(used.max(), slots.shape[1])), EMPTY, np.int64)
    for one in range(len(first) - 1):
        for at in range(merged[one], merged[one + 1]):
            table[rank[at], slot[at]] = one
    return table, merged, rank[:count].copy(), slot[:count].copy(), quota[:count].copy(), spilled


@kernel
def _merge(
    start: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, used: np.ndarray, slots: np.ndarray
) -> tuple[np.ndarray, int]:
    """Moves replicas and chunks together in place, those of one expert and rank into one; new ones get a slot.

    Returns:
        Where each expert's begin now, and the tokens in slots that ``slots`` does not have.
    """
    merged = np.zeros_like(start)
    count, spilled = 0, 0
    for one in range(len(start) - 1):
        for at in range(start[one], start[one + 1]):
            holder, here = rank[at], quota[at]
            if count > merged[one] and rank[count - 1] == holder:
                quota[count - 1] += here
            else:
                if slot[at] == EMPTY:
                    slot[at] = used[holder]
                    used[holder] += 1
                rank[count], slot[count], quota[count] = holder, slot[at], here
                count += 1
            if slot[count - 1] >= slots.shape[1] or slots[holder, slot[count - 1]] == EMPTY:
                spilled += here
        merged[one + 1] = count
    return merged, spilled


@kernel
def _lined_up(
    first: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    quota: np.ndarray,
    expert: np.ndarray,
    helper: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Each expert's replicas and chunks by rank, replicas before chunks (whose slot is ``EMPTY``); where they begin."""
    start = _starts(first, expert)
    ranks, slots = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64)
    quotas, filled = np.empty(start[-1], np.int64), start[:-1].copy()
    for one in range(len(first) - 1):
        for at in range(first[one], first[one + 1]):
            ranks[filled[one]], slots[filled[one]], quotas[filled[one]] = rank[at], slot[at], quota[at]
            filled[one] += 1
    for chunk in range(len(expert)):
        at = filled[expert[chunk]]
        ranks[at], slots[at], quotas[at] = helper[chunk], EMPTY, tokens[chunk]
        filled[expert[chunk]] += 1
    for one in range(len(first) - 1):
        _sort_by_rank(ranks, slots, quotas, start[one], start[one + 1])
    return start, ranks, slots, quotas


@kernel
def _starts(first: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """int64 ``[E + 1]``: where each expert's replicas and then its chunks go."""
    start = np.zeros_like(first)
    for chunk in range(len(expert)):
        start[expert[chunk] + 1] += 1
    for at in range(len(first) - 1):
        start[at + 1] += start[at] + first[at + 1] - first[at]
    return start


@kernel
def _sort_by_rank(rank: np.ndarray, slot: np.ndarray, tokens: np.ndarray, start: int, stop: int) -> None:
    """Insertion sort of one expert's replicas, a stable one."""
    for at in range(start + 1, stop):
        back = at
        while back > start and rank[back] < rank[back - 1]:
            rank[back], rank[back - 1] = rank[back - 1], rank[back]
            slot[back], slot[back - 1] = slot[back - 1], slot[back]
            tokens[back], tokens[back - 1] = tokens[back - 1], tokens[back]
            back -= 1
