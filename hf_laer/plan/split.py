"""The exact split: for a given placement and the loads that are really there, none has a lower maximum.

Ranks are levelled by augmenting paths. A rank above the target hands tokens of an expert to another holder of
that expert, which may pass on tokens of another one, until a rank below the target is reached. If there is no
such path, the ranks that can be reached hold tokens which no other rank can compute, so their mean is a lower
bound: it becomes the target (Newton's method for parametric flow). All in integers, so the result is optimal
to the token.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .least_traffic import level_cheaply
from .ranges import node_ranges
from .types import Placement, Plan, Split
from .validate import check_loads, check_placement, node_width


def exact_split(loads: np.ndarray, placement: Placement, ranks_per_node: int | None = None, *, slack: int = 0) -> Split:
    """Splits each expert's tokens over its replicas: lowest possible maximum first, then little traffic.

    The idea of splitting this step's tokens over a stale placement is ours; LPLB (deepseek-ai) does it by a
    linear programme.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        placement: Slot table ``[N, S]``.
        ranks_per_node: Consecutive ranks that share a node; ``None`` means one node.
        slack: Tokens by which the most loaded rank may exceed the optimum, to leave more where they are.

    Returns:
        The split. The most loaded rank has the least load that this placement allows, plus at most ``slack``;
        among the splits with that maximum it is one of those with the fewest tokens that leave their node.
        With several nodes a replica is listed once per range of the stream that it serves, and not at all if
        it serves none; with one node once, in rank order, so that many tokens stay on their rank.

    Raises:
        ValueError: Bad loads or placement, an expert with tokens that no rank holds, or a negative slack.
    """
    loads = check_loads(loads)
    slots = check_placement(placement, *loads.shape)
    width = node_width(ranks_per_node, len(loads))
    if slack < 0:
        raise ValueError(f"slack={slack} must not be negative")
    first, rank, slot, quota = level_quotas(loads, slots, width, int(slack))
    return Split(*stream_ranges(loads, first, rank, slot, quota, width))


def fsep(loads: np.ndarray, placement: Placement, ranks_per_node: int | None = None, *, slack: int = 0) -> Plan:
    """FSEP's plan: a placement made from recent loads, and the exact split of the loads that are there now.

    Placement after LAER-MoE (arXiv 2602.11686); see :func:`exact_split` for arguments and errors.
    """
    return Plan(placement, exact_split(loads, placement, ranks_per_node, slack=slack))


def level_quotas(
    loads: np.ndarray, slots: np.ndarray, width: int, slack: int, capacity: int = -1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """first ``[E + 1]``, rank, slot and tokens ``[R]`` of the replicas, one per filled slot, in rank order.

    With a ``capacity`` below what the most loaded rank must hold, all others are levelled down to it.

    Raises:
        ValueError: An expert with tokens that no rank holds.
    """
    first, rank, slot, quota, homeless = _quotas(loads, slots, width, slack, capacity)
    if homeless >= 0:
        tokens = int(loads[:, homeless].sum())
        raise ValueError(f"expert {homeless} has {tokens} tokens, but no rank holds it")
    return first, rank, slot, quota


@kernel
def _quotas(
    loads: np.ndarray, slots: np.ndarray, width: int, slack: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """As :func:`level_quotas`, and an expert that has tokens but no replica (or -1)."""
    ranks, experts = loads.shape
    first, rank, slot, at_slot = index_replicas(slots, experts)
    expert_of = np.empty(len(rank), np.int64)
    own = np.empty(len(rank), np.int64)
    for expert in range(experts):
        if first[expert] == first[expert + 1] and loads[:, expert].sum() > 0:
            return first, rank, slot, own, expert
        for at in range(first[expert], first[expert + 1]):
            expert_of[at] = expert
            own[at] = loads[rank[at], expert]
    node_of = np.arange(ranks) // width
    quota = nearest_quotas(loads, first, rank, width)
    held = np.zeros(ranks, np.int64)
    for at in range(len(rank)):
        held[rank[at]] += quota[at]
    target = held.max()
    if width < ranks:
        target = level(quota.copy(), held.copy(), own, first, rank, expert_of, at_slot, node_of, slack)
        by_node, served = _by_node(loads, quota, rank, expert_of, node_of)
        level_cheaply(quota, held, served, by_node, first, rank, expert_of, at_slot, node_of, target)
    if width == ranks or held.max() > target:
        level(quota, held, own, first, rank, expert_of, at_slot, node_of, slack)
    if held.max() > capacity >= 0:
        by_node, served = _by_node(loads, quota, rank, expert_of, node_of)
        level_cheaply(quota, held, served, by_node, first, rank, expert_of, at_slot, node_of, capacity)
    return first, rank, slot, quota, -1


@kernel
def stream_ranges(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, quota: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A split's first, rank, slot and end: in rank order on one node, by :func:`node_ranges` on several."""
    if width < loads.shape[0]:
        node_of = np.arange(loads.shape[0]) // width
        expert_of = np.zeros(len(rank), np.int64)
        by_node, _ = _by_node(loads, quota, rank, expert_of, node_of)
        return node_ranges(by_node, first, rank, slot, quota, width)
    end = quota.copy()
    for expert in range(len(first) - 1):
        for at in range(first[expert] + 1, first[expert + 1]):
            end[at] += end[at - 1]
    return first, rank, slot, end


@kernel
def _by_node(
    loads: np.ndarray, quota: np.ndarray, rank: np.ndarray, expert_of: np.ndarray, node_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that each node's ranks send and that its replicas serve, int64 ``[nodes, E]`` both."""
    ranks, experts = loads.shape
    by_node = np.zeros((node_of[ranks - 1] + 1, experts), np.int64)
    served = np.zeros_like(by_node)
    for source in range(ranks):
        for expert in range(experts):
            by_node[node_of[source], expert] += loads[source, expert]
    for at in range(len(rank)):
        served[node_of[rank[at]], expert_of[at]] += quota[at]
    return by_node, served


@kernel
def index_replicas(slots: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Replicas by expert, in rank order: first ``[E + 1]``, rank and slot ``[R]``, and the replica in each
    slot.
    """
    first = np.zeros(experts + 1, np.int64)
    for rank in range(slots.shape[0]):
        for expert in slots[rank]:
            if expert >= 0:
                first[expert + 1] += 1
    first = np.cumsum(first)
    next_of = first[:-1].copy()
    rank_of = np.empty(first[-1], np.int64)
    slot_of = np.empty(first[-1], np.int64)
    at_slot = np.full(slots.shape, -1, np.int64)
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            expert = slots[rank, slot]
            if expert >= 0:
                at = next_of[expert]
                next_of[expert] += 1
                rank_of[at], slot_of[at], at_slot[rank, slot] = rank, slot, at
    return first, rank_of, slot_of, at_slot


@kernel
def nearest_quotas(loads: np.ndarray, first: np.ndarray, rank: np.ndarray, width: int) -> np.ndarray:
    """Tokens per replica, int64 ``[R]``, if each source uses its own copy, else one of its node, else either.

    Only the two replicas around a source in rank order are asked, so that quotas can be ranges of the stream;
    of two that are equally near the less loaded rank serves.
    """
    ranks, experts = loads.shape
    quota = np.zeros(len(rank), np.int64)
    held = np.zeros(ranks, np.int64)
    by_expert = np.ascontiguousarray(loads.T)
    for expert in range(experts):
        start, stop = first[expert], first[expert + 1]
        low = 0
        for at in range(start, stop):
            mine = rank[at]
            if at > start and low < mine:
                # The sources between two replicas: on the first's node, on neither's (or both's), on mine.
                other = rank[at - 1]
                shared = other // width == mine // width
                near = low if shared else min((other // width + 1) * width, mine)
                far = mine if shared else max(mine // width * width, near)
                _serve(by_expert[expert], low, near, at - 1, quota, held, other)
                for source in range(near, far):
                    if held[other] <= held[mine]:
                        _serve(by_expert[expert], source, source + 1, at - 1, quota, held, other)
                    else:
                        _serve(by_expert[expert], source, source + 1, at, quota, held, mine)
                low = far
            _serve(by_expert[expert], low, mine + 1, at, quota, held, mine)
            low = mine + 1
        if start < stop:
            _serve(by_expert[expert], low, ranks, stop - 1, quota, held, rank[stop - 1])
    return quota


@kernel
def _serve(tokens: np.ndarray, low: int, high: int, at: int, quota: np.ndarray, held: np.ndarray, rank: int) -> None:
    """Adds the tokens of the sources ``low`` up to ``high`` to replica ``at`` on ``rank``."""
    total = 0
    for source in range(low, high):
        total += tokens[source]
    quota[at] += total
    held[rank] += total


@kernel
def level(
    quota: np.ndarray,
    held: np.ndarray,
    own: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    node_of: np.ndarray,
    slack: int,
) -> int:
    """Moves quotas (and the ranks' ``held``) until no rank exceeds the optimal maximum plus ``slack``: returned.

    Tokens beyond a replica's ``own`` come from elsewhere anyway and move first; only when those cannot level
    the ranks do tokens leave their source.
    """
    ranks = len(held)
    target = -(-held.sum() // ranks) + slack
    seen_rank = np.zeros(ranks, np.int64)
    seen_expert = np.zeros(len(first) - 1, np.int64)
    came_by = np.empty(ranks, np.int64)  # the replica that receives, on the path to each rank
    came_from = np.empty(ranks, np.int64)  # the replica that gives
    queue = np.empty(ranks, np.int64)
    mark = 0
    nothing = np.zeros_like(own)
    _hand_over(quota, held, own, first, rank, expert_of, at_slot, target, node_of)
    _hand_over(quota, held, own, first, rank, expert_of, at_slot, target, np.zeros_like(node_of))
    only_foreign = True
    while True:
        floor = own if only_foreign else nothing
        mark += 1
        goal, reached = _search(
            quota, held, floor, first, rank, expert_of, at_slot, target, node_of, mark,
            seen_rank, seen_expert, came_by, came_from, queue,
        )  # fmt: skip
        if reached == 0:
            return target
        if goal >= 0:
            _augment(quota, held, floor, rank, target, goal, came_by, came_from)
        elif only_foreign:
            only_foreign = False
        else:
            stuck = held[queue[:reached]].sum()
            target = max(target, -(-stuck // reached) + slack)
            only_foreign = True


@kernel
def _hand_over(
    quota: np.ndarray,
    held: np.ndarray,
    floor: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    target: int,
    node_of: np.ndarray,
) -> None:
    """One pass of single steps between ranks with the same ``node_of``: most of the work, at little cost."""
    for giver in range(len(held)):
        if held[giver] <= target:
            continue
        for gives in at_slot[giver]:
            if gives < 0:
                break
            expert = expert_of[gives]
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                if held[taker] >= target or node_of[taker] != node_of[giver]:
                    continue
                tokens = min(target - held[taker], held[giver] - target, quota[gives] - floor[gives])
                if tokens > 0:
                    quota[gives] -= tokens
                    quota[takes] += tokens
                    held[giver] -= tokens
                    held[taker] += tokens


@kernel
def _search(
    quota: np.ndarray,
    held: np.ndarray,
    floor: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    expert_of: np.ndarray,
    at_slot: np.ndarray,
    target: int,
    node_of: np.ndarray,
    mark: int,
    seen_rank: np.ndarray,
    seen_expert: np.ndarray,
    came_by: np.ndarray,
    came_from: np.ndarray,
    queue: np.ndarray,
) -> tuple[int, int]:
    """Breadth first from the ranks above ``target``: a rank below it or -1, and how many were reached."""
    tail = 0
    for start in range(len(held)):
        if held[start] > target:
            queue[tail] = start
            tail += 1
            seen_rank[start] = mark
            came_by[start] = -1
    head = 0
    while head < tail:
        giver = queue[head]
        head += 1
        goal = -1
        for gives in at_slot[giver]:
            if gives < 0 or quota[gives] <= floor[gives] or seen_expert[expert_of[gives]] == mark:
                continue
            expert = expert_of[gives]
            seen_expert[expert] = mark
            for takes in range(first[expert], first[expert + 1]):
                taker = rank[takes]
                if seen_rank[taker] == mark:
                    continue
                seen_rank[taker] = mark
                came_by[taker], came_from[taker] = takes, gives
                queue[tail] = taker
                tail += 1
                if held[taker] < target and (goal < 0 or _better(taker, goal, giver, held, node_of)):
                    goal = taker
        if goal >= 0:
            return goal, tail
    return -1, tail


@kernel
def _better(taker: int, goal: int, giver: int, held: np.ndarray, node_of: np.ndarray) -> bool:
    """The giver's node first, then the emptier rank."""
    near, goal_near = node_of[taker] == node_of[giver], node_of[goal] == node_of[giver]
    if near != goal_near:
        return near
    return held[taker] < held[goal]


@kernel
def _augment(
    quota: np.ndarray,
    held: np.ndarray,
    floor: np.ndarray,
    rank: np.ndarray,
    target: int,
    goal: int,
    came_by: np.ndarray,
    came_from: np.ndarray,
) -> None:
    """Hands as many tokens as fit along the path that ends at ``goal``."""
    tokens = target - held[goal]
    at = goal
    while came_by[at] >= 0:
        gives = came_from[at]
        tokens = min(tokens, quota[gives] - floor[gives])
        at = rank[gives]
    tokens = min(tokens, held[at] - target)
    held[at] -= tokens
    held[goal] += tokens
    at = goal
    while came_by[at] >= 0:
        quota[came_by[at]] += tokens
        quota[came_from[at]] -= tokens
        at = rank[came_from[at]]
