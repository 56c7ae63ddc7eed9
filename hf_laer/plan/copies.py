"""How many copies of each expert: LAER's three rules and small moves around them (arXiv 2602.11686).

Every rule gives each expert at least one copy, at most one per rank, and uses ``room = min(N * S, N * E)``
copies. Loads per copy are compared by cross products, so no rounding decides.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel


@kernel
def even_copies(experts: int, ranks: int, room: int) -> np.ndarray:
    """int64 ``[E]``: the same number of copies each; what is left over goes to the lowest ids."""
    copies = np.empty(experts, np.int64)
    for expert in range(experts):
        copies[expert] = room // experts + (1 if expert < room % experts else 0)
    return copies


@kernel
def greedy_copies(load: np.ndarray, ranks: int, room: int, step: int) -> np.ndarray:
    """int64 ``[E]``: one more copy for the expert with the most load per copy (LAER's pq, EPLB), and again.

    An expert that already has ``step`` copies gets ``step`` at once (LAER: a node's worth for one that spans
    all nodes).
    """
    return raise_copies(load, np.ones(len(load), np.int64), ranks, room, step)


@kernel
def proportional_copies(load: np.ndarray, ranks: int, room: int) -> np.ndarray:
    """int64 ``[E]``: copies by share of the load, rounded down; the rest as :func:`greedy_copies`."""
    unit = max(-(-load.sum() // room), 1)
    copies = np.empty(len(load), np.int64)
    excess = -room  # above 0 only from raising cold experts to one copy
    for expert in range(len(load)):
        copies[expert] = min(max(load[expert] // unit, 1), ranks)
        excess += copies[expert]
    while excess > 0:
        cheapest = -1
        for expert in range(len(load)):
            if copies[expert] > 1 and (
                cheapest < 0 or load[expert] * (copies[cheapest] - 1) < load[cheapest] * (copies[expert] - 1)
            ):
                cheapest = expert
        copies[cheapest] -= 1
        excess -= 1
    return raise_copies(load, copies, ranks, room, ranks + 1)


@kernel
def raise_copies(load: np.ndarray, copies: np.ndarray, ranks: int, room: int, step: int) -> np.ndarray:
    """Adds copies where the load per copy is highest until ``room`` are used; changes ``copies``."""
    heap = np.arange(len(load))
    size = len(heap)
    for at in range(size // 2 - 1, -1, -1):
        _sift(heap, size, at, load, copies)
    left = room - copies.sum()
    while left > 0:
        expert = heap[0]
        if copies[expert] >= ranks:  # one on every rank: out of the race
            size -= 1
            heap[0] = heap[size]
        else:
            more = min(step if copies[expert] >= step else 1, left, ranks - copies[expert])
            copies[expert] += more
            left -= more
        _sift(heap, size, 0, load, copies)
    return copies


@kernel
def moved_copy(copies: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """A candidate near ``copies``: one copy moved between two experts picked by ``seed`` (LAER's random
    moves).
    """
    moved = copies.copy()
    givers, takers = np.empty(len(copies), np.int64), np.empty(len(copies), np.int64)
    giving, taking = 0, 0
    for expert in range(len(copies)):
        if copies[expert] > 1:
            givers[giving] = expert
            giving += 1
        if copies[expert] < ranks:
            takers[taking] = expert
            taking += 1
    if giving == 0 or taking == 0:
        return moved
    # A linear congruential generator in int64: the same pick on every machine.
    state = (seed * 1103515245 + 12345) % 2147483648
    giver = givers[(state >> 8) % giving]
    state = (state * 1103515245 + 12345) % 2147483648
    taker = takers[(state >> 8) % taking]
    moved[giver] -= 1
    moved[taker] += 1
    return moved


@kernel
def _hotter(a: int, b: int, load: np.ndarray, copies: np.ndarray) -> bool:
    """Whether ``a`` has more load per copy than ``b``; equal: fewer copies, then the lower id."""
    left, right = load[a] * copies[b], load[b] * copies[a]
    if left != right:
        return left > right
    return copies[a] < copies[b] or (copies[a] == copies[b] and a < b)


@kernel
def _sift(heap: np.ndarray, size: int, at: int, load: np.ndarray, copies: np.ndarray) -> None:
    """Restores the heap (hottest expert first) below ``at``."""
    while True:
        top = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < size and _hotter(heap[child], heap[top], load, copies):
                top = child
        if top == at:
            return
        heap[at], heap[top] = heap[top], heap[at]
        at = top
