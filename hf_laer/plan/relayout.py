"""Which rank gets which copy: LAER's greedy placement (arXiv 2602.11686, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .order import descending
from .types import EMPTY


@kernel
def load_units(load: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """int64 ``[E]``: load per copy in fixed point, at least 1: copies without load are spread out too."""
    scale = 1 << 20 if load.sum() < 1 << 40 else 1
    unit = np.empty(len(load), np.int64)
    for expert in range(len(load)):
        unit[expert] = load[expert] * scale // copies[expert] + 1
    return unit


@kernel
def place_copies(load: np.ndarray, copies: np.ndarray, ranks: int, slots: int, width: int) -> np.ndarray:
    """Slot table int64 ``[N, S]`` with ``copies[e]`` copies of each expert ``e``, none twice on one rank.

    Hottest copies first. Each goes, among the ranks with a free slot and without that expert, to the node
    that has the fewest copies of it, there to the least loaded rank; ties go to the lowest rank. Needs ``1 <=
    copies <= N`` and ``copies.sum() <= N * S``; nodes are ``width`` consecutive ranks.
    """
    unit = load_units(load, copies)
    table = np.full((ranks, slots), EMPTY, np.int64)
    used, held = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    newest = np.full(ranks, EMPTY, np.int64)  # an expert's copies are placed in one go: this tells who holds it
    nodes = -(-ranks // width)
    best, open_nodes = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    room, everyone = np.empty(nodes, np.int64), np.arange(nodes)
    _least_loaded(best, everyone, width, slots, used, held, newest, EMPTY)
    for expert in descending(unit):
        left = copies[expert]
        while left > 0:
            # All nodes that still have room hold equally many copies, so each gets one, or the emptiest do.
            count = 0
            for node in range(nodes):
                if best[node] >= 0:
                    open_nodes[count], room[count] = node, -held[best[node]]
                    count += 1
            chosen = open_nodes[:count]
            if count == 0:
                open_nodes[0] = 0
                best[0] = _make_room(table, used, held, newest, unit, expert)
                chosen = open_nodes[:1]
            elif left == 1:
                at = room[:count].argmax()
                chosen = open_nodes[at : at + 1]
            elif left < count:
                chosen = open_nodes[descending(room[:count])[:left]]
            for node in chosen:
                rank = best[node]
                table[rank, used[rank]] = expert
                used[rank] += 1
                held[rank] += unit[expert]
                newest[rank] = expert
            left -= len(chosen)
            _least_loaded(best, chosen, width, slots, used, held, newest, expert)
        _least_loaded(best, everyone, width, slots, used, held, newest, EMPTY)
    return table


@kernel
def _least_loaded(
    best: np.ndarray,
    nodes: np.ndarray,
    width: int,
    slots: int,
    used: np.ndarray,
    held: np.ndarray,
    newest: np.ndarray,
    expert: int,
) -> None:
    """Sets each node's least loaded rank that has a free slot and did not just get ``expert``, or -1."""
    for node in nodes:
        lowest = -1
        for rank in range(node * width, min((node + 1) * width, len(used))):
            open_for = used[rank] < slots and (expert < 0 or newest[rank] != expert)
            if open_for and (lowest < 0 or held[rank] < held[lowest]):
                lowest = rank
        best[node] = lowest


@kernel
def _make_room(
    table: np.ndarray, used: np.ndarray, held: np.ndarray, newest: np.ndarray, unit: np.ndarray, expert: int
) -> int:
    """Frees a slot on a rank that lacks ``expert`` when every free slot is on a rank that has it.

    A full rank without ``expert`` gives one of its experts to a rank with a free slot. One that the taker
    lacks always exists: the giver holds S experts, the taker fewer than S, ``expert`` among them, which the
    giver lacks. The one with the smallest load goes.
    """
    giver, taker = -1, -1
    for rank in range(len(used)):
        if newest[rank] != expert and (giver < 0 or held[rank] < held[giver]):
            giver = rank
        if used[rank] < table.shape[1] and (taker < 0 or held[rank] < held[taker]):
            taker = rank
    leaves = -1
    for slot in range(used[giver]):
        moved = table[giver, slot]
        known = False
        for other in range(used[taker]):
            known = known or table[taker, other] == moved
        if not known and (leaves < 0 or unit[moved] < unit[table[giver, leaves]]):
            leaves = slot
    moved = table[giver, leaves]
    table[taker, used[taker]] = moved
    used[taker] += 1
    held[taker] += unit[moved]
    held[giver] -= unit[moved]
    used[giver] -= 1
    table[giver, leaves] = table[giver, used[giver]]
    return giver
