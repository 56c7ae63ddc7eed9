"""What levelling works on: a placement's replicas, and the tokens that each serves to begin with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel


class Network(NamedTuple):
    """Replicas by expert, in rank order, and who serves how much; ``quota``, ``held`` and ``over`` change in place.

    The replicas of one expert in one node are a *hub*; hubs are in the order of their replicas.

    Args:
        first: int64 ``[E + 1]``; the replicas of expert ``e`` are ``first[e]`` up to ``first[e + 1]``.
        rank: int64 ``[R]``, each replica's rank.
        slot: int64 ``[R]``, its slot there.
        expert: int64 ``[R]``, its expert.
        at_slot: int64 ``[N, S]``, the replica in each slot, -1 where it is empty.
        node: int64 ``[N]``, each rank's node.
        quota: int64 ``[R]``, tokens that a replica serves.
        held: int64 ``[N]``, tokens that a rank computes.
        sent: int64 ``[nodes, E]``, tokens of each node's ranks.
        hub: int64 ``[R]``, each replica's hub.
        hub_first: int64 ``[hubs + 1]``; the replicas of hub ``h`` are ``hub_first[h]`` up to ``hub_first[h + 1]``.
        hubs_of: int64 ``[E + 1]``; the hubs of expert ``e`` are ``hubs_of[e]`` up to ``hubs_of[e + 1]``.
        over: int64 ``[hubs]``, tokens that a hub serves beyond those that its node's ranks send.
    """

    first: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    expert: np.ndarray
    at_slot: np.ndarray
    node: np.ndarray
    quota: np.ndarray
    held: np.ndarray
    sent: np.ndarray
    hub: np.ndarray
    hub_first: np.ndarray
    hubs_of: np.ndarray
    over: np.ndarray


@kernel
def network(loads: np.ndarray, slots: np.ndarray, width: int) -> tuple[Network, int]:
    """The replicas of the slot table ``[N, S]`` with :func:`_nearest` quotas, on nodes of ``width`` ranks.

    Also an expert that has tokens in ``loads`` int64 ``[N, E]`` but no replica, or -1.
    """
    ranks, experts = loads.shape
    first, rank, slot, at_slot = index_replicas(slots, experts)
    node = np.arange(ranks) // width
    upto = _running_totals(loads)
    quota, held = np.zeros(len(rank), np.int64), np.zeros(ranks, np.int64)
    sent = np.empty((node[-1] + 1, experts), np.int64)
    for at in range(len(sent)):
        sent[at] = upto[min((at + 1) * width, ranks)] - upto[at * width]
    homeless = -1
    for expert in range(experts):
        if first[expert] == first[expert + 1] and upto[ranks, expert] > 0:
            homeless = expert
        _nearest(upto, expert, first, rank, node, width, quota, held)
    expert_of, hub, hub_first, hubs_of, over = _hubs(first, rank, node, quota, sent)
    return (
        Network(first, rank, slot, expert_of, at_slot, node, quota, held, sent, hub, hub_first, hubs_of, over),
        homeless,
    )


@kernel
def _hubs(
    first: np.ndarray, rank: np.ndarray, node: np.ndarray, quota: np.ndarray, sent: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The network's ``expert``, ``hub``, ``hub_first``, ``hubs_of`` and ``over``."""
    size, count = len(rank), 0
    expert_of, hub, hub_first = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size + 1, np.int64)
    hubs_of, over = np.empty(len(first), np.int64), np.empty(size, np.int64)
    for expert in range(len(first) - 1):
        hubs_of[expert] = count
        for at in range(first[expert], first[expert + 1]):
            if at == first[expert] or node[rank[at]] != node[rank[at - 1]]:
                hub_first[count], over[count] = at, -sent[node[rank[at]], expert]
                count += 1
            expert_of[at], hub[at] = expert, count - 1
            over[count - 1] += quota[at]
    hub_first[count] = size
    hubs_of[-1] = count
    return expert_of, hub, hub_first[: count + 1], hubs_of, over[:count]


@kernel
def index_replicas(slots: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Replicas by expert, in rank order: first ``[E + 1]``, rank and slot ``[R]``, and the replica in each slot."""
    first = np.zeros(experts + 1, np.int64)
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            if slots[rank, slot] >= 0:
                first[slots[rank, slot] + 1] += 1
    for expert in range(experts):
        first[expert + 1] += first[expert]
    next_of = first[:-1].copy()
    rank_of, slot_of = np.empty(first[-1], np.int64), np.empty(first[-1], np.int64)
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
def _running_totals(loads: np.ndarray) -> np.ndarray:
    """int64 ``[N + 1, E]``: tokens of the ranks before each."""
    upto = np.empty((loads.shape[0] + 1, loads.shape[1]), np.int64)
    upto[0] = 0
    for rank in range(loads.shape[0]):
        for expert in range(loads.shape[1]):
            upto[rank + 1, expert] = upto[rank, expert] + loads[rank, expert]
    return upto


@kernel
def _nearest(
    upto: np.ndarray,
    expert: int,
    first: np.ndarray,
    rank: np.ndarray,
    node: np.ndarray,
    width: int,
    quota: np.ndarray,
    held: np.ndarray,
) -> None:
    """Adds one expert's tokens: each source uses its own replica, else one of its node, else either neighbour.

    Only the two replicas around a source in rank order are asked, so that on one node quotas are ranges of the
    stream; what is equally near to both evens out their ranks.
    """
    for at in range(first[expert], first[expert + 1]):
        mine = rank[at]
        if at == first[expert]:
            tokens = upto[mine + 1, expert]
        else:
            # The sources in between: on the other's node, on neither's (or both's), on mine.
            other = rank[at - 1]
            near, far = other + 1, mine
            if node[other] != node[mine]:
                near = min((node[other] + 1) * width, mine)
                far = max(node[mine] * width, near)
            home, between = upto[near, expert] - upto[other + 1, expert], upto[far, expert] - upto[near, expert]
            home += min(max((held[mine] - held[other] - home + between) // 2, 0), between)
            quota[at - 1] += home
            held[other] += home
            tokens = upto[mine + 1, expert] - upto[other + 1, expert] - home
        if at + 1 == first[expert + 1]:
            tokens += upto[len(held), expert] - upto[mine + 1, expert]
        quota[at] += tokens
        held[mine] += tokens


@kernel
def copied(net: Network) -> Network:
    """The same with ``quota``, ``held`` and ``over`` of its own."""
    changing = net.quota.copy(), net.held.copy(), net.sent, net.hub, net.hub_first, net.hubs_of, net.over.copy()
    return Network(net.first, net.rank, net.slot, net.expert, net.at_slot, net.node, *changing)
