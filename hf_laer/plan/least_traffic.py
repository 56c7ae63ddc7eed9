"""Levels ranks to a given target so that as few tokens as possible leave their node.

Minimum-cost flow by successive shortest paths, all shortest paths at a time (primal-dual). Start: every token at
home where its node has a copy, the cheapest there is. Then excess goes to ranks with room along paths of least price:
handing a token of an expert from one node to another costs 1 if a token of the giver's node must then leave it, and
earns 1 if one of the taker's node may come back.

Prices are measured back from the ranks with room. Whoever has too much, however far away, then follows falling prices:
as long as each path is a cheapest one, the order does not matter.
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
    price, queue, later = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    # The price at an expert's cheapest replica in a node, and at its cheapest in any, as a token from elsewhere pays.
    near, far = np.empty(len(net.over), np.int64), np.empty(experts, np.int64)
    _free_steps(net, target)
    while net.held.max() > target:
        lowest = _prices(net, target, price, near, far, queue, later)
        if lowest == FAR or not _fill(net, target, price, near, far):
            return


@kernel
def _free_steps(net: Network, target: int) -> None:
    """Single steps that cost nothing, first those inside a node: paths of price 0, and most of the work."""
    first, rank, expert_of, at_slot = net.first, net.rank, net.expert, net.at_slot
    quota, held, hub, hub_first, over = net.quota, net.held, net.hub, net.hub_first, net.over
    for inside in (True, False):
        for giver in range(len(held)):
            for slot in range(at_slot.shape[1]):
                gives = at_slot[giver, slot]
                if held[giver] <= target or gives < 0:
                    break
                home, expert = hub[gives], expert_of[gives]
                # No token leaves its node while the giver's serves more of the expert than its ranks send.
                free = quota[gives] if inside else min(quota[gives], over[home])
                start, stop = first[expert], first[expert + 1]
                if inside:
                    start, stop = hub_first[home], hub_first[home + 1]
                for takes in range(start, stop if free > 0 else start):
                    taker = rank[takes]
                    tokens = min(target - held[taker], held[giver] - target, free)
                    if tokens <= 0 or (hub[takes] == home) != inside:
                        continue
                    free -= tokens
                    quota[gives] -= tokens
                    quota[takes] += tokens
                    held[giver] -= tokens
                    held[taker] += tokens
                    over[home] -= tokens
                    over[hub[takes]] += tokens


@kernel
def _prices(
    net: Network,
    target: int,
    price: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    queue: np.ndarray,
    later: np.ndarray,
) -> int:
    """The least price of getting a token from each rank to one below ``target``; the least of a rank above it.

    Label correcting, price by price: what costs more waits in ``later``. Ends when all ranks above the target know
    theirs; without a way it is ``FAR``. Of one piece, long as it is: with what a taker asks in a function of its own,
    the exact split takes 1.7 times as long.
    """
    rank, expert_of, at_slot, quota, held = net.rank, net.expert, net.at_slot, net.quota, net.held
    hub, hub_first, hubs_of, over = net.hub, net.hub_first, net.hubs_of, net.over
    ranks, slots = len(price), at_slot.shape[1]
    waits = np.zeros(ranks, np.bool_)
    size = _begin(net, target, price, near, far, queue, waits)
    head, late, limit = 0, 0, PRICE
    for _ in range(64 * ranks):
        if size == 0:
            if late == 0 or _dearest(held, price, target) < limit:
                break
            queue, later, head, size, late = later, queue, 0, late, 0
            limit += PRICE
        taker = queue[head]  # a ring: a rank waits in it at most once
        head = head + 1 if head + 1 < ranks else 0
        size -= 1
        paid = price[taker]
        if paid >= limit:
            later[late] = taker
            late += 1
            continue
        waits[taker] = False
        for slot in range(slots):
            takes = at_slot[taker, slot]
            if takes < 0:
                break
            home, expert = hub[takes], expert_of[takes]
            back = paid if over[home] >= 0 else paid - PRICE
            inside, outside = paid < near[home], back < far[expert]
            if not (inside or outside):
                continue
            near[home], far[expert] = min(near[home], paid), min(far[expert], back)
            for other in range(hubs_of[expert] if outside else home, hubs_of[expert + 1] if outside else home + 1):
                asked = paid + 1 if other == home else back + 1 + (0 if over[other] > 0 else PRICE)
                if other == home and not inside:
                    continue
                for gives in range(hub_first[other], hub_first[other + 1]):
                    giver = rank[gives]
                    if asked < price[giver] and quota[gives] > 0:
                        price[giver] = asked
                        if not waits[giver]:
                            waits[giver] = True
                            queue[head + size if head + size < ranks else head + size - ranks] = giver
                            size += 1
    return _cheapest(held, price, target)


@kernel
def _begin(
    net: Network,
    target: int,
    price: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    queue: np.ndarray,
    waits: np.ndarray,
) -> int:
    """Nothing is known but that ranks with room cost nothing: how many there are, now in the queue."""
    price[:] = FAR
    near[:] = FAR
    far[:] = FAR
    size = 0
    for rank in range(len(price)):
        if net.held[rank] < target:
            price[rank], waits[rank], queue[size] = 0, True, rank
            size += 1
    return size


@kernel
def _cheapest(held: np.ndarray, price: np.ndarray, target: int) -> int:
    """The least price of a rank above ``target``."""
    lowest = FAR
    for rank in range(len(held)):
        if held[rank] > target:
            lowest = min(lowest, price[rank])
    return lowest


@kernel
def _dearest(held: np.ndarray, price: np.ndarray, target: int) -> int:
    """The highest price of a rank above ``target``, as far as known."""
    highest = 0
    for rank in range(len(held)):
        if held[rank] > target:
            highest = max(highest, price[rank])
    return highest


@kernel
def _fill(net: Network, target: int, price: np.ndarray, near: np.ndarray, far: np.ndarray) -> bool:
    """Ranks above ``target`` hand tokens down the prices; whether any moved.

    A blocking flow by depth-first search: each dead end is entered once.
    """
    rank, held = net.rank, net.held
    dead, slot_of = np.zeros(len(price), np.bool_), np.zeros(len(price), np.int64)
    taker_near, taker_far = net.hub_first[:-1].copy(), net.first[:-1].copy()
    gave, took = np.empty(len(price), np.int64), np.empty(len(price), np.int64)
    moved = False
    for start in range(len(price)):
        at, hops = start, 0
        while held[start] > target and price[start] < FAR:
            found = _taker(net, at, price, near, far, dead, slot_of, taker_near, taker_far)
            if found >= 0:
                gave[hops], took[hops] = net.at_slot[at, slot_of[at]], found
                at = rank[found]
                hops += 1
                if held[at] < target:
                    _along(net, target, gave, took, hops)
                    moved = True
                    at, hops = start, 0
            else:
                dead[at] = True
                if hops == 0:
                    break
                hops -= 1
                at = rank[gave[hops]]
    return moved


@kernel
def _taker(
    net: Network,
    giver: int,
    price: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    dead: np.ndarray,
    slot_of: np.ndarray,
    taker_near: np.ndarray,
    taker_far: np.ndarray,
) -> int:
    """The replica that takes tokens of the expert in the giver's slot ``slot_of``, which moves on; -1: none is left."""
    first, rank, expert_of, at_slot = net.first, net.rank, net.expert, net.at_slot
    quota, hub, hub_first, over = net.quota, net.hub, net.hub_first, net.over
    paid = price[giver] - 1
    while slot_of[giver] < at_slot.shape[1] and at_slot[giver, slot_of[giver]] >= 0:
        gives = at_slot[giver, slot_of[giver]]
        home, expert = hub[gives], expert_of[gives]
        if quota[gives] > 0 and paid == near[home]:
            takes, stop = taker_near[home], hub_first[home + 1]
            while takes < stop and (price[rank[takes]] != paid or dead[rank[takes]]):
                takes += 1
            taker_near[home] = takes
            if takes < stop:
                return takes
        away = paid if over[home] > 0 else paid - PRICE
        if quota[gives] > 0 and away == far[expert]:
            takes, stop = taker_far[expert], first[expert + 1]
            while takes < stop:
                asked = away if over[hub[takes]] >= 0 else away + PRICE
                if price[rank[takes]] == asked and not dead[rank[takes]]:
                    break
                takes += 1
            taker_far[expert] = takes
            if takes < stop:
                return takes
        slot_of[giver] += 1
    return -1


@kernel
def _along(net: Network, target: int, gave: np.ndarray, took: np.ndarray, hops: int) -> None:
    """Hands as many tokens along a path as keep its price."""
    rank, hub, over, quota, held = net.rank, net.hub, net.over, net.quota, net.held
    hops = _without_detours(hub, net.expert, gave, took, hops)
    start, goal = rank[gave[0]], rank[took[hops - 1]]
    tokens = min(held[start] - target, target - held[goal])
    for at in range(hops):
        tokens = min(tokens, quota[gave[at]])
        home, to = hub[gave[at]], hub[took[at]]
        if home != to:
            tokens = min(tokens, over[home] if over[home] > 0 else tokens, -over[to] if over[to] < 0 else tokens)
    for at in range(hops):
        quota[gave[at]] -= tokens
        quota[took[at]] += tokens
        over[hub[gave[at]]] -= tokens
        over[hub[took[at]]] += tokens
    held[start] -= tokens
    held[goal] += tokens


@kernel
def _without_detours(hub: np.ndarray, expert_of: np.ndarray, gave: np.ndarray, took: np.ndarray, hops: int) -> int:
    """Shortens a path on which an expert changes nodes twice, which would ask for the same surplus twice.

    What lies between is a round trip of price 0: the first giver may as well give to the last taker. The new length.
    """
    length = 0
    for hop in range(hops):
        gives, takes = gave[hop], took[hop]
        gave[length], took[length] = gives, takes
        for before in range(length if hub[gives] != hub[takes] else 0):
            if expert_of[gave[before]] == expert_of[gives] and hub[gave[before]] != hub[took[before]]:
                took[before] = takes
                length = before
                break
        length += 1
    return length
