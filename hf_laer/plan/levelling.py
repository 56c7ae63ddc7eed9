"""Levels ranks as far as a placement allows: a maximum flow, whose target rises while it cannot be met.

A rank above the target hands tokens of an expert to another holder of that expert, which may pass on tokens of
another one, until a rank below the target is reached. Paths are found a layer graph at a time (Dinic), with layers
counted back from the ranks with room, so that each rank above the target moves on towards its nearest. Where there is
no path, the ranks that can be reached hold tokens which no other rank can compute, so their mean is a lower bound: it
becomes the target (Newton's method for parametric flow). All in integers: optimal to the token.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .network import Network


@kernel
def level(net: Network, own: np.ndarray, slack: int) -> int:
    """Moves quotas until no rank exceeds the least possible maximum plus ``slack``, which is returned.

    Tokens beyond a replica's ``own`` come from elsewhere anyway and move first; only when those cannot level the ranks
    do tokens leave their source.
    """
    ranks = len(net.held)
    target = _lower_bound(net) + slack
    if net.held.max() <= target:
        return target
    nothing = np.zeros_like(own)
    depth, hub = np.empty(ranks, np.int64), np.empty(len(net.first) - 1, np.int64)
    queue = np.empty(ranks, np.int64)
    _hand_over(net, own, target, True)
    _hand_over(net, own, target, False)
    only_foreign = any_own = own.max() > 0
    while True:
        floor = own if only_foreign else nothing
        above, cut_off = _layers(net, floor, target, depth, hub, queue)
        if above == 0:
            return target
        if only_foreign and cut_off == above:
            only_foreign = False
        elif only_foreign or cut_off == 0:
            _fill(net, floor, target, depth, hub)
        else:
            target = max(target, _stuck(net, target, depth, queue) + slack)
            only_foreign = any_own


@kernel
def _lower_bound(net: Network) -> int:
    """Tokens that some rank must hold: the mean over all ranks, or an expert's over those that hold it."""
    bound = -(-net.held.sum() // len(net.held))
    for expert in range(len(net.first) - 1):
        tokens, copies = 0, net.first[expert + 1] - net.first[expert]
        for at in range(net.first[expert], net.first[expert + 1]):
            tokens += net.quota[at]
        if copies > 0:
            bound = max(bound, -(-tokens // copies))
    return bound


@kernel
def _hand_over(net: Network, floor: np.ndarray, target: int, inside: bool) -> None:
    """One pass of single steps, inside nodes only or between any ranks: most of the work, at little cost."""
    first, rank, expert_of, at_slot, node = net.first, net.rank, net.expert, net.at_slot, net.node
    quota, held = net.quota, net.held
    for giver in range(len(held)):
        for slot in range(at_slot.shape[1]):
            gives = at_slot[giver, slot]
            if held[giver] <= target or gives < 0:
                break
            expert = expert_of[gives]
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                if held[taker] < target and (not inside or node[taker] == node[giver]):
                    room = min(target - held[taker], held[giver] - target)
                    tokens = min(room, quota[gives] - floor[gives])
                    if tokens > 0:
                        quota[gives] -= tokens
                        quota[takes] += tokens
                        held[giver] -= tokens
                        held[taker] += tokens


@kernel
def _layers(
    net: Network, floor: np.ndarray, target: int, depth: np.ndarray, hub: np.ndarray, queue: np.ndarray
) -> tuple[int, int]:
    """Steps from each rank to one below the target (-1: no way), and from where an expert's tokens go (-1: nowhere).

    How many ranks are above the target, and how many of them have no way; once all have one, nothing more is explored.
    """
    first, rank, expert_of, at_slot, quota, held = net.first, net.rank, net.expert, net.at_slot, net.quota, net.held
    depth[:] = -1
    hub[:] = -1
    tail, head, above = 0, 0, 0
    for at in range(len(depth)):
        if held[at] < target:
            queue[tail], depth[at] = at, 0
            tail += 1
        above += 1 if held[at] > target else 0
    left = above
    while head < tail and left > 0:
        taker = queue[head]
        head += 1
        for slot in range(at_slot.shape[1]):
            takes = at_slot[taker, slot]
            if takes < 0:
                break
            expert = expert_of[takes]
            if hub[expert] >= 0:
                continue
            hub[expert] = depth[taker]
            for gives in range(first[expert], first[expert + 1]):
                giver = rank[gives]
                if depth[giver] < 0 and quota[gives] > floor[gives]:
                    depth[giver], queue[tail] = depth[taker] + 1, giver
                    tail += 1
                    left -= 1 if held[giver] > target else 0
    return above, left


@kernel
def _stuck(net: Network, target: int, depth: np.ndarray, queue: np.ndarray) -> int:
    """The mean, rounded up, over the ranks that can be reached from those above the target without a way."""
    first, rank, expert_of, at_slot, quota, held = net.first, net.rank, net.expert, net.at_slot, net.quota, net.held
    tail, head, tokens = 0, 0, 0
    handed, seen = np.zeros(len(first) - 1, np.bool_), np.zeros(len(held), np.bool_)
    for at in range(len(held)):
        if held[at] > target and depth[at] < 0:
            queue[tail], seen[at] = at, True
            tail += 1
    while head < tail:
        giver = queue[head]
        head += 1
        tokens += held[giver]
        for slot in range(at_slot.shape[1]):
            gives = at_slot[giver, slot]
            if gives < 0:
                break
            expert = expert_of[gives]
            if quota[gives] == 0 or handed[expert]:
                continue
            handed[expert] = True
            for takes in range(first[expert], first[expert + 1]):
                if not seen[rank[takes]]:
                    seen[rank[takes]], queue[tail] = True, rank[takes]
                    tail += 1
    return -(-tokens // tail)


@kernel
def _fill(net: Network, floor: np.ndarray, target: int, depth: np.ndarray, hub: np.ndarray) -> None:
    """A blocking flow down the layers: paths by depth-first search, each dead end entered once."""
    # In one piece, on local names: a call, or a field of the network, costs more than a step of the search.
    first, rank, expert_of, at_slot, quota, held = net.first, net.rank, net.expert, net.at_slot, net.quota, net.held
    slot_of, taker_of = np.zeros(len(depth), np.int64), first[:-1].copy()
    gave, took = np.empty(len(depth), np.int64), np.empty(len(depth), np.int64)
    for start in range(len(depth)):
        at, hops = start, 0
        while held[start] > target:
            takes, stop, below = 0, 0, depth[at] - 1
            while takes == stop and slot_of[at] < at_slot.shape[1] and at_slot[at, slot_of[at]] >= 0:
                gives = at_slot[at, slot_of[at]]
                expert = expert_of[gives]
                if below >= 0 and quota[gives] > floor[gives] and hub[expert] == below:
                    takes, stop = taker_of[expert], first[expert + 1]
                    while takes < stop and depth[rank[takes]] != below:
                        takes += 1
                    taker_of[expert] = takes
                if takes == stop:
                    slot_of[at] += 1
                else:
                    gave[hops], took[hops] = gives, takes
            if takes < stop:
                at = rank[takes]
                hops += 1
                if held[at] < target:
                    _along(rank, quota, held, floor, target, gave[:hops], took[:hops])
                    at, hops = start, 0
            elif hops > 0:
                hops -= 1
                taker_of[expert_of[gave[hops]]] += 1
                at = rank[gave[hops]]
            else:
                break


@kernel
def _along(
    rank: np.ndarray,
    quota: np.ndarray,
    held: np.ndarray,
    floor: np.ndarray,
    target: int,
    gave: np.ndarray,
    took: np.ndarray,
) -> None:
    """Hands as many tokens as fit along a path of replicas that give and take."""
    tokens = min(held[rank[gave[0]]] - target, target - held[rank[took[-1]]])
    for at in range(len(gave)):
        tokens = min(tokens, quota[gave[at]] - floor[gave[at]])
    for at in range(len(gave)):
        quota[gave[at]] -= tokens
        quota[took[at]] += tokens
    held[rank[gave[0]]] -= tokens
    held[rank[took[-1]]] += tokens
