"""Copies around pinned ones: every expert with its owner, further copies where they level most.

One after the other, each to the expert that has then the most load per copy, so that the ranks which take the hottest
experts' copies are still apart when the next hottest are dealt: the exact split can pass load along from rank to rank
by the experts that they share.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .copies import greedy_copies
from .order import descending
from .owners import owner_slots
from .relayout import load_units
from .types import EMPTY


@kernel
def first_homes(load: np.ndarray, ranks: int, slots: int, width: int) -> np.ndarray:
    """int64 ``[E]``: a rank for each expert's first copy, at most ``ceil(E / N)`` on one.

    Those first that will have the most load per copy once copies fill ``slots`` on each rank. Each goes to the least
    loaded rank, of alike ones to that on the least loaded node (of ``width`` ranks), so that the hottest are dealt over
    the nodes: on one, they would draw the tokens of all others there.
    """
    unit = load_units(load, greedy_copies(load, ranks, ranks * slots, ranks + 1))
    most = -(-len(load) // ranks)
    held, used, by_node = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(-(-ranks // width), np.int64)
    owners = np.empty(len(load), np.int64)
    for expert in descending(unit):
        lowest = -1
        for rank in range(ranks):
            if used[rank] == most:
                continue
            alike = lowest >= 0 and held[rank] == held[lowest]
            if lowest < 0 or held[rank] < held[lowest] or (alike and by_node[rank // width] < by_node[lowest // width]):
                lowest = rank
        owners[expert] = lowest
        held[lowest] += unit[expert]
        by_node[lowest // width] += unit[expert]
        used[lowest] += 1
    return owners


@kernel
def with_replicas(load: np.ndarray, owners: np.ndarray, ranks: int, slots: int, width: int, count: int) -> np.ndarray:
    """Slot table ``[N, S]`` of own experts and up to ``count`` replicas; those of a smaller count are among them.

    Replicas go to the expert with the most load per copy (LAER's priority queue, arXiv 2602.11686), on the node with
    the fewest copies of it, there to the least loaded rank. Nodes are ``width`` consecutive ranks.
    """
    own, _ = owner_slots(owners, ranks, np.zeros(ranks, np.int64))
    table = np.full((ranks, slots), EMPTY, np.int64)
    table[:, : own.shape[1]] = own
    scale = 1 << 20 if load.sum() < 1 << 40 else 1
    held, used = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    copies, full = np.ones(len(load), np.int64), np.zeros(len(load), np.bool_)
    near = np.zeros((len(load), -(-ranks // width)), np.int64)
    holds, holder = np.zeros((len(load), ranks), np.bool_), np.empty((len(load), ranks), np.int64)
    for expert in range(len(load)):
        owner = owners[expert]
        held[owner] += load[expert] * scale
        used[owner] += 1
        near[expert, owner // width] = 1
        holds[expert, owner], holder[expert, 0] = True, owner
    nobody, lowest = np.zeros(ranks, np.bool_), np.empty(near.shape[1], np.int64)
    for node in range(len(lowest)):
        lowest[node] = _lowest(held, used, slots, width, node, nobody)
    while count > 0:
        expert = _hottest(load, copies, full)
        if expert < 0:
            break
        taker = _taker(holds[expert], near[expert], lowest, held, used, slots, width)
        if taker < 0:
            full[expert] = True
            continue
        before, after = load[expert] * scale // copies[expert], load[expert] * scale // (copies[expert] + 1)
        for at in range(copies[expert]):
            rank = holder[expert, at]
            held[rank] += after - before
            other = lowest[rank // width]
            if used[rank] < slots and (held[rank] < held[other] or (held[rank] == held[other] and rank < other)):
                lowest[rank // width] = rank
        holds[expert, taker], holder[expert, copies[expert]] = True, taker
        near[expert, taker // width] += 1
        copies[expert] += 1
        held[taker] += after
        table[taker, used[taker]] = expert
        used[taker] += 1
        lowest[taker // width] = _lowest(held, used, slots, width, taker // width, nobody)
        count -= 1
    return table


@kernel
def _hottest(load: np.ndarray, copies: np.ndarray, full: np.ndarray) -> int:
    """The expert with the most load per copy that can have another one, or -1."""
    best = -1
    for expert in range(len(load)):
        if load[expert] == 0 or full[expert]:
            continue
        if best < 0 or load[expert] * copies[best] > load[best] * copies[expert]:
            best = expert
    return best


@kernel
def _taker(
    holds: np.ndarray,
    near: np.ndarray,
    lowest: np.ndarray,
    held: np.ndarray,
    used: np.ndarray,
    slots: int,
    width: int,
) -> int:
    """The rank for one more copy: of those with a free slot and without the expert, on the node with the fewest copies
    of it (``near``, per node), the least loaded; -1 if there is none. ``lowest`` is, per node, :func:`_lowest`.
    """
    best, fewest = -1, len(held) + 1
    for node in range(len(near)):
        if lowest[node] < 0 or near[node] > fewest:
            continue
        rank = lowest[node]
        if holds[rank]:
            rank = _lowest(held, used, slots, width, node, holds)
        if rank >= 0 and (near[node] < fewest or held[rank] < held[best]):
            best, fewest = rank, near[node]
    return best


@kernel
def _lowest(held: np.ndarray, used: np.ndarray, slots: int, width: int, node: int, left_out: np.ndarray) -> int:
    """The least loaded rank of a node with a free slot that is not ``left_out`` (bool ``[N]``), or -1."""
    best = -1
    for rank in range(node * width, min((node + 1) * width, len(held))):
        if used[rank] < slots and not left_out[rank] and (best < 0 or held[rank] < held[best]):
            best = rank
    return best
