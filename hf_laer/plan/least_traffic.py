"""Levels ranks to a given target so that as few tokens as possible leave their node.

Minimum-cost flow by successive shortest paths. Start: every token at home where its node has a copy, the cheapest
there is. Then excess goes to ranks with room along paths of least cost, where handing a token of an expert from
one node to another costs 1 if a token of the giver's node must then leave it, and earns 1 if one of the taker's
node may come back.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel

FAR = 1 << 30


@kernel
def level_cheaply(
    quota: np.ndarray,
    held: np.ndarray,
    served: np.ndarray,
    by_node: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    node_of: np.ndarray,
    target: int,
) -> None:
    """Moves quotas until no rank holds more than ``target``, or as near to that as the placement allows.

    ``served`` int64 ``[nodes, E]`` are the tokens that a node's replicas serve, ``by_node`` those that its ranks
    send; changes ``quota``, ``held`` and ``served``.
    """
    ranks = len(held)
    cost = np.empty(ranks, np.int64)
    came_by, came_from = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    while True:
        most = _paths(
            quota, held, served, by_node, first, rank, expert_of, at_slot, node_of, target, cost, came_by, came_from
        )  # fmt: skip
        if most == 0:
            return
        lowest = FAR
        for goal in range(ranks):
            if held[goal] < target:
                lowest = min(lowest, cost[goal])
        # Single steps first, many in one go: the least price cannot fall, so all of them are shortest paths.
        moved = _steps(
            quota, held, served, by_node, first, rank, expert_of, at_slot, node_of, target, lowest
        )  # fmt: skip
        for goal in range(ranks if moved == 0 else 0):
            if held[goal] < target and cost[goal] == lowest and lowest < FAR:
                moved += _push(
                    quota, held, served, by_node, rank, expert_of, node_of, target, goal, lowest, came_by, came_from
                )  # fmt: skip
        if moved == 0:
            return


@kernel
def _steps(
    quota: np.ndarray,
    held: np.ndarray,
    served: np.ndarray,
    by_node: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    node_of: np.ndarray,
    target: int,
    price: int,
) -> int:
    """Hands tokens straight from ranks above ``target`` to ranks below it where that costs ``price``."""
    moved = 0
    for giver in range(len(held)):
        for gives in at_slot[giver]:
            if held[giver] <= target or gives < 0:
                break
            expert, node = expert_of[gives], node_of[giver]
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                to = node_of[taker]
                tokens = min(target - held[taker], held[giver] - target, quota[gives])
                if tokens <= 0:
                    continue
                if to == node:
                    if price != 0:
                        continue
                else:
                    surplus = served[node, expert] - by_node[node, expert]
                    lack = by_node[to, expert] - served[to, expert]
                    if (0 if surplus > 0 else 1) - (1 if lack > 0 else 0) != price:
                        continue
                    tokens = min(tokens, surplus if surplus > 0 else tokens, lack if lack > 0 else tokens)
                quota[gives] -= tokens
                quota[takes] += tokens
                held[giver] -= tokens
                held[taker] += tokens
                served[node, expert] -= tokens
                served[to, expert] += tokens
                moved += tokens
    return moved


@kernel
def _paths(
    quota: np.ndarray,
    held: np.ndarray,
    served: np.ndarray,
    by_node: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    node_of: np.ndarray,
    target: int,
    cost: np.ndarray,
    came_by: np.ndarray,
    came_from: np.ndarray,
) -> int:
    """Cheapest paths from all ranks above ``target`` (label correcting); how many there are of those."""
    ranks = len(held)
    queue = np.empty(ranks, np.int64)  # a ring: a rank waits in it at most once
    waits = np.zeros(ranks, np.bool_)
    size, head = 0, 0
    for start in range(ranks):
        cost[start] = FAR
        if held[start] > target:
            cost[start], came_by[start], waits[start] = 0, -1, True
            queue[size] = start
            size += 1
    most = size
    steps = 0
    while size > 0 and steps < 16 * ranks:
        steps += 1
        giver = queue[head]
        head = (head + 1) % ranks
        size -= 1
        waits[giver] = False
        node = node_of[giver]
        for gives in at_slot[giver]:
            if gives < 0 or quota[gives] == 0:
                continue
            expert = expert_of[gives]
            leave = 0 if served[node, expert] > by_node[node, expert] else 1
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                if held[taker] > target:
                    continue
                to = node_of[taker]
                price = 0 if to == node else leave - (1 if served[to, expert] < by_node[to, expert] else 0)
                if cost[giver] + price < cost[taker]:
                    cost[taker] = cost[giver] + price
                    came_by[taker], came_from[taker] = takes, gives
                    if not waits[taker]:
                        waits[taker] = True
                        queue[(head + size) % ranks] = taker
                        size += 1
    return most


@kernel
def _push(
    quota: np.ndarray,
    held: np.ndarray,
    served: np.ndarray,
    by_node: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    node_of: np.ndarray,
    target: int,
    goal: int,
    expected: int,
    came_by: np.ndarray,
    came_from: np.ndarray,
) -> int:
    """Hands tokens along the path to ``goal`` while its price is the expected one; how many."""
    tokens = target - held[goal]
    at, hops, price = goal, 0, 0
    while came_by[at] >= 0:
        gives = came_from[at]
        expert, giver = expert_of[gives], rank[gives]
        node, to = node_of[giver], node_of[at]
        tokens = min(tokens, quota[gives])
        if node != to:
            surplus = served[node, expert] - by_node[node, expert]
            lack = by_node[to, expert] - served[to, expert]
            if surplus > 0:
                tokens = min(tokens, surplus)
            else:
                price += 1
            if lack > 0:
                tokens = min(tokens, lack)
                price -= 1
        at = giver
        hops += 1
        if hops > len(held):
            return 0
    if price != expected:  # an earlier path of this round has changed it
        return 0
    tokens = min(tokens, held[at] - target)
    if tokens <= 0:
        return 0
    held[at] -= tokens
    held[goal] += tokens
    at = goal
    while came_by[at] >= 0:
        gives = came_from[at]
        expert = expert_of[gives]
        quota[came_by[at]] += tokens
        quota[gives] -= tokens
        served[node_of[rank[gives]], expert] -= tokens
        served[node_of[at], expert] += tokens
        at = rank[gives]
    return tokens
