"""Levels ranks to a given target so that as few tokens as possible leave their node.

Minimum-cost flow by successive shortest paths, all paths of one price at a time (primal-dual). Start: every token at
home where its node has a copy, the cheapest there is. Then excess goes to ranks with room along paths of least price:
handing a token of an expert from one node to another costs 1 if a token of the giver's node must then leave it, and
earns 1 if one of the taker's node may come back.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .network import Network

FAR = 1 << 60
# Labels are prices in this unit plus one per hop, so that of the cheapest paths the shortest come first.
PRICE = 1 << 20


@kernel
def level_cheaply(net: Network, target: int) -> None:
    """Moves quotas until no rank holds more than ``target``, or as near to that as the placement allows."""
    ranks, experts = len(net.held), len(net.first) - 1
    price, queue, waits = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.zeros(ranks, np.bool_)
    # What a token costs that has got to an expert's replicas in some node, and between nodes.
    near, far = np.empty(net.served.shape, np.int64), np.empty(experts, np.int64)
    _free_steps(net, target)
    while True:
        lowest = _prices(net, target, price, near, far, queue, waits)
        if lowest == FAR or not _fill(net, target, lowest, price, near, far):
            return


@kernel
def _free_steps(net: Network, target: int) -> None:
    """Single steps that cost nothing, first those inside a node: paths of price 0, and most of the work."""
    first, rank, expert_of, at_slot, node_of = net.first, net.rank, net.expert, net.at_slot, net.node
    quota, held, sent, served = net.quota, net.held, net.sent, net.served
    for inside in (True, False):
        for giver in range(len(held)):
            node = node_of[giver]
            for slot in range(at_slot.shape[1]):
                gives = at_slot[giver, slot]
                if held[giver] <= target or gives < 0:
                    break
                expert = expert_of[gives]
                # No token leaves its node while the giver's serves more of the expert than its ranks send.
                free = quota[gives] if inside else min(quota[gives], served[node, expert] - sent[node, expert])
                for takes in range(first[expert], first[expert + 1] if free > 0 else 0):
                    taker = rank[takes]
                    tokens = min(target - held[taker], held[giver] - target, free)
                    if tokens <= 0 or (node_of[taker] == node) != inside:
                        continue
                    free -= tokens
                    quota[gives] -= tokens
                    quota[takes] += tokens
                    held[giver] -= tokens
                    held[taker] += tokens
                    served[node, expert] -= tokens
                    served[node_of[taker], expert] += tokens


@kernel
def _prices(
    net: Network,
    target: int,
    price: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    queue: np.ndarray,
    waits: np.ndarray,
) -> int:
    """The least price of getting a token from a rank above ``target`` to each rank (label correcting).

    Returns the least of a rank with room, ``FAR`` if there is none.
    """
    first, rank, expert_of, at_slot, node_of = net.first, net.rank, net.expert, net.at_slot, net.node
    quota, held, sent, served = net.quota, net.held, net.sent, net.served
    ranks = len(price)
    price[:] = FAR
    near[:] = FAR
    far[:] = FAR
    size, head, steps = 0, 0, 0
    for start in range(ranks):
        if held[start] > target:
            price[start], waits[start], queue[size] = 0, True, start
            size += 1
    while size > 0 and steps < 16 * ranks:  # a ring: a rank waits in it at most once
        steps += 1
        giver = queue[head]
        head = head + 1 if head + 1 < ranks else 0
        size -= 1
        waits[giver] = False
        node, paid = node_of[giver], price[giver]
        for slot in range(at_slot.shape[1]):
            gives = at_slot[giver, slot]
            if gives < 0:
                break
            expert = expert_of[gives]
            away = paid if served[node, expert] > sent[node, expert] else paid + PRICE
            inside, outside = paid < near[node, expert], away < far[expert]
            if quota[gives] == 0 or not (inside or outside):
                continue
            near[node, expert], far[expert] = min(near[node, expert], paid), min(far[expert], away)
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                to = node_of[taker]
                if held[taker] > target or not (inside if to == node else outside):
                    continue
                asked = paid + 1
                if to != node:
                    asked = away + 1 - (PRICE if served[to, expert] < sent[to, expert] else 0)
                if asked < price[taker]:
                    price[taker] = asked
                    if not waits[taker]:
                        waits[taker] = True
                        queue[head + size if head + size < ranks else head + size - ranks] = taker
                        size += 1
    waits[:] = False
    lowest = FAR
    for goal in range(ranks):
        if held[goal] < target:
            lowest = min(lowest, price[goal])
    return lowest


@kernel
def _fill(net: Network, target: int, lowest: int, price: np.ndarray, near: np.ndarray, far: np.ndarray) -> bool:
    """Hands tokens along paths of the price ``lowest`` by depth-first search; whether any were."""
    # In one piece, on local names: a call, or a field of the network, costs more than a step of the search.
    first, rank, expert_of, at_slot, node_of = net.first, net.rank, net.expert, net.at_slot, net.node
    quota, held, sent, served = net.quota, net.held, net.sent, net.served
    ranks, highest = len(price), lowest // PRICE * PRICE + PRICE
    seen, slot_of = np.zeros(ranks, np.bool_), np.zeros(ranks, np.int64)
    taker_near, taker_far = np.full(near.shape, -1, np.int64), first[:-1].copy()
    gave, took = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    moved = False
    for start in range(ranks):
        at, hops = start, 0
        seen[start] = seen[start] or held[start] > target
        while held[start] > target:
            node, paid = node_of[at], price[at]
            found = -1
            while found < 0 and slot_of[at] < at_slot.shape[1] and at_slot[at, slot_of[at]] >= 0:
                gives = at_slot[at, slot_of[at]]
                expert = expert_of[gives]
                if quota[gives] > 0 and paid == near[node, expert]:
                    takes = taker_near[node, expert]
                    if takes < 0:  # the node's first replica
                        takes = gives
                        while takes > first[expert] and node_of[rank[takes - 1]] == node:
                            takes -= 1
                    while found < 0 and takes < first[expert + 1] and node_of[rank[takes]] == node:
                        if price[rank[takes]] == paid + 1 and not seen[rank[takes]]:
                            found = takes
                        else:
                            takes += 1
                    taker_near[node, expert] = takes
                away = paid if served[node, expert] > sent[node, expert] else paid + PRICE
                if found < 0 and quota[gives] > 0 and away == far[expert]:
                    takes = taker_far[expert]
                    while found < 0 and takes < first[expert + 1]:
                        to = node_of[rank[takes]]
                        asked = away + 1 - (PRICE if served[to, expert] < sent[to, expert] else 0)
                        if price[rank[takes]] == asked and not seen[rank[takes]]:
                            found = takes
                        else:
                            takes += 1
                    taker_far[expert] = takes
                if found < 0:
                    slot_of[at] += 1
                else:
                    gave[hops], took[hops] = gives, found
            if found >= 0:
                at = rank[found]
                hops += 1
                seen[at] = True
                if held[at] < target and price[at] < highest:
                    _along(net, target, gave, took, hops, seen)
                    moved = True
                    at, hops = start, 0
            elif hops > 0:  # a dead end: it stays seen
                hops -= 1
                at = rank[gave[hops]]
            else:
                break
    return moved


@kernel
def _along(net: Network, target: int, gave: np.ndarray, took: np.ndarray, hops: int, seen: np.ndarray) -> None:
    """Hands as many tokens along a path as keep its price; its ranks may be seen again."""
    rank, expert_of, node_of, sent, served = net.rank, net.expert, net.node, net.sent, net.served
    quota, held = net.quota, net.held
    for at in range(hops):
        seen[rank[took[at]]] = False
    hops = _without_detours(rank, expert_of, node_of, gave, took, hops)
    start, goal = rank[gave[0]], rank[took[hops - 1]]
    tokens = min(held[start] - target, target - held[goal])
    for at in range(hops):
        gives, node, to = gave[at], node_of[rank[gave[at]]], node_of[rank[took[at]]]
        tokens = min(tokens, quota[gives])
        if node != to:
            surplus = served[node, expert_of[gives]] - sent[node, expert_of[gives]]
            lack = sent[to, expert_of[gives]] - served[to, expert_of[gives]]
            tokens = min(tokens, surplus if surplus > 0 else tokens, lack if lack > 0 else tokens)
    for at in range(hops):
        gives, takes = gave[at], took[at]
        quota[gives] -= tokens
        quota[takes] += tokens
        served[node_of[rank[gives]], expert_of[gives]] -= tokens
        served[node_of[rank[takes]], expert_of[gives]] += tokens
    held[start] -= tokens
    held[goal] += tokens


@kernel
def _without_detours(
    rank: np.ndarray, expert_of: np.ndarray, node_of: np.ndarray, gave: np.ndarray, took: np.ndarray, hops: int
) -> int:
    """Shortens a path on which an expert changes nodes twice, which would ask for the same surplus twice.

    What lies between is a round trip of price 0: the first giver may as well give to the last taker. The new length.
    """
    length = 0
    for hop in range(hops):
        gives, takes = gave[hop], took[hop]
        gave[length], took[length] = gives, takes
        crosses = node_of[rank[gives]] != node_of[rank[takes]]
        for before in range(length if crosses else 0):
            same = expert_of[gave[before]] == expert_of[gives]
            if same and node_of[rank[gave[before]]] != node_of[rank[took[before]]]:
                took[before] = takes
                length = before
                break
        length += 1
    return length
