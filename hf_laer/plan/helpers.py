"""Which experts to fetch, and where to: as few as let all ranks come down to a target.

A placement may leave ranks above the target whose tokens no rank with room can compute. By the theorem of maximum flow
and minimum cut, a helper (one more expert on one more rank) then lets through what can reach the expert, or what can
leave the rank, whichever is less; and these two do not depend on each other, as the cut lies between them. So the
expert that most of the excess can be brought to, on whatever rank it is, goes to the rank that can make most room,
itself or by handing tokens of its own on; and again, until no rank is above the target. Where one expert levels several
ranks, or one rank's room is reached by way of others, one fetch does what chunk by chunk takes several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .network import Network

# Of the experts and ranks that look best by what they hold themselves, so many are looked at to the end; of the ways to
# or from one of them, so many are followed: a longer look takes longer and changes little. More for the first helpers
# than for further ones, as each is looked for while the ranks wait: over 1024 ranks there may be a thousand.
FEW, TRIED, PATHS = 6, 8, 16
MANY, THEN = 64, 2
LAST, LAST_PATHS = 1, 2
FOLLOWED = 1 << 60
NOWHERE = -1


class Links(NamedTuple):
    """Replicas as lists by rank and by expert, which helpers are added to in place; those of the placement come first.

    Args:
        rank: int64 ``[R]``, each replica's rank; room for helpers behind the placement's.
        expert: int64 ``[R]``, its expert.
        quota: int64 ``[R]``, tokens that it serves.
        at_rank: int64 ``[R]``, the rank's next replica, -1 after its last.
        of_expert: int64 ``[R]``, the expert's next replica, -1 after its last.
        rank_head: int64 ``[N]``, each rank's first replica, -1 for none.
        expert_head: int64 ``[E]``, likewise.
        held: int64 ``[N]``, tokens that a rank computes.
    """

    rank: np.ndarray
    expert: np.ndarray
    quota: np.ndarray
    at_rank: np.ndarray
    of_expert: np.ndarray
    rank_head: np.ndarray
    expert_head: np.ndarray
    held: np.ndarray


@kernel
def fewest_helpers(net: Network, mean: int, target: int, halvings: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert and rank of helpers ``[C]``, with which no rank need hold more than ``target``.

    About as few as can be, found one by one; of as many, those with which the ranks come down nearest to ``mean``.

    Args:
        net: A placement's replicas, their quotas levelled; left as they are.
        mean: Tokens per rank, rounded up.
        target: At least ``mean``.
        halvings: How often the distance between the two is halved to see how near.
    """
    base = len(net.rank)
    pairs = len(net.held) * (len(net.first) - 1)  # with every expert on every rank there is nothing left to level
    links, count = _found(net, target, pairs - base)
    low, high = mean, target
    for _ in range(halvings):
        if count == 0 or count > FEW or low == high:
            break
        middle = (low + high) // 2
        tried, fewer = _found(net, middle, count)
        if fewer < 0:
            low = middle + 1
        else:
            high, links, count = middle, tried, fewer
    return links.expert[base : base + count].copy(), links.rank[base : base + count].copy()


@kernel
def _found(net: Network, target: int, most: int) -> tuple[Links, int]:
    """Replicas with helpers, and how many these are; -1 if ``most`` of them do not do."""
    links = _linked(net, most)
    _flow(links, links.quota, links.held, target, NOWHERE, NOWHERE, FOLLOWED)
    helped = np.zeros(len(links.held), np.int64)
    count = 0
    while True:
        excess = np.maximum(links.held - target, 0).sum()
        if excess == 0:
            return links, count
        if count == most:
            return links, -1
        tried = TRIED if count < FEW else THEN if count < MANY else LAST
        paths = PATHS if count < MANY else LAST_PATHS
        expert, giver, given = _expert_to_fetch(links, target, excess, tried, paths)
        # A rank that none of the excess reaches, so one that does not hold the expert.
        taker = _rank_to_help(links, target, given, net.node, net.node[giver], helped, tried, paths)
        at = len(net.rank) + count
        _link(links, at, taker, expert)
        helped[taker] += 1
        count += 1
        _flow(links, links.quota, links.held, target, NOWHERE, NOWHERE, FOLLOWED)


@kernel
def _linked(net: Network, more: int) -> Links:
    """The network's replicas, with room for ``more``."""
    size, ranks, experts = len(net.rank) + more, len(net.held), len(net.first) - 1
    rank, expert, quota = np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.int64)
    at_rank, of_expert = np.empty(size, np.int64), np.empty(size, np.int64)
    heads = np.full(ranks, -1, np.int64), np.full(experts, -1, np.int64)
    links = Links(rank, expert, quota, at_rank, of_expert, heads[0], heads[1], net.held.copy())
    for at in range(len(net.rank) - 1, -1, -1):
        _link(links, at, net.rank[at], net.expert[at])
        quota[at] = net.quota[at]
    return links


@kernel
def _link(links: Links, at: int, rank: int, expert: int) -> None:
    """Makes replica ``at``, of no tokens yet, the first of its rank and of its expert."""
    links.rank[at], links.expert[at], links.quota[at] = rank, expert, 0
    links.at_rank[at], links.rank_head[rank] = links.rank_head[rank], at
    links.of_expert[at], links.expert_head[expert] = links.expert_head[expert], at


@kernel
def _flow(links: Links, quota: np.ndarray, held: np.ndarray, target: int, source: int, sink: int, paths: int) -> int:
    """Moves as many tokens as can be to ranks below ``target``, along at most so many shortest paths; how many.

    They come from ``source``, a rank with no end of tokens, or where it is -1 from the ranks above the target; they go
    to ``sink``, an expert that swallows them, where it is not -1. Changes ``quota`` and ``held``.
    """
    ranks, moved = len(held), 0
    gave, took = np.empty(len(links.expert_head), np.int64), np.empty(ranks, np.int64)
    queue = np.empty(ranks, np.int64)
    for _ in range(paths):
        end = _search(links, quota, held, target, source, sink, gave, took, queue)
        if end < 0:
            break
        tokens = target - held[end]
        if sink >= 0:
            end = int(gave[sink])  # a replica, whose rank the path comes from
            tokens = quota[end]
        last = links.rank[end] if sink >= 0 else end
        at = last
        while took[at] >= 0:
            gives = gave[links.expert[took[at]]]
            tokens = min(tokens, quota[gives])
            at = links.rank[gives]
        if source < 0:
            tokens = min(tokens, held[at] - target)
            held[at] -= tokens
        if sink >= 0:
            quota[end] -= tokens
        else:
            held[last] += tokens
        at = last
        while took[at] >= 0:
            gives = gave[links.expert[took[at]]]
            quota[took[at]] += tokens
            quota[gives] -= tokens
            at = links.rank[gives]
        moved += tokens
    return moved


@kernel
def _search(
    links: Links,
    quota: np.ndarray,
    held: np.ndarray,
    target: int,
    source: int,
    sink: int,
    gave: np.ndarray,
    took: np.ndarray,
    queue: np.ndarray,
) -> int:
    """A rank below the target, breadth first (with a ``sink``: 0 once it is reached), or -1 if there is no way.

    ``gave`` is set to the replica from which each expert was reached, ``took`` to the one by which each rank was (-1
    where the way begins, -2 where there is none).
    """
    gave[:] = -1
    took[:] = -2
    head, tail = 0, 0
    for rank in range(len(held)):
        if rank == source or (source < 0 and held[rank] > target):
            queue[tail], took[rank] = rank, -1
            tail += 1
    while head < tail:
        gives = links.rank_head[queue[head]]
        head += 1
        while gives >= 0:
            expert = links.expert[gives]
            if quota[gives] > 0 and gave[expert] < 0:
                gave[expert] = gives
                if expert == sink:
                    return 0
                takes = links.expert_head[expert]
                while takes >= 0:
                    rank = links.rank[takes]
                    if took[rank] == -2:
                        queue[tail], took[rank] = rank, takes
                        tail += 1
                        if sink < 0 and held[rank] < target:
                            return rank
                    takes = links.of_expert[takes]
            gives = links.at_rank[gives]
    return -1


@kernel
def _expert_to_fetch(links: Links, target: int, excess: int, tries: int, paths: int) -> tuple[int, int, int]:
    """The expert that most of the excess can be brought to, the rank above the target with most of its tokens, and how
    much that is; of alike ones the one with most tokens on such ranks.
    """
    experts = len(links.expert_head)
    direct, giver = np.zeros(experts, np.int64), np.full(experts, -1, np.int64)
    most = np.zeros(experts, np.int64)
    for rank in range(len(links.held)):
        at = links.rank_head[rank] if links.held[rank] > target else -1
        while at >= 0:
            expert = links.expert[at]
            direct[expert] += min(links.quota[at], links.held[rank] - target)
            if links.quota[at] > most[expert]:
                most[expert], giver[expert] = links.quota[at], rank
            at = links.at_rank[at]
    best, given = -1, 0
    for _ in range(tries):
        expert = int(direct.argmax())
        if direct[expert] <= 0:
            break
        direct[expert] = 0
        found = _flow(links, links.quota.copy(), links.held.copy(), target, NOWHERE, expert, paths)
        if found > given:
            best, given = expert, found
        if given == excess:
            break
    return best, giver[best], given


@kernel
def _rank_to_help(
    links: Links,
    target: int,
    given: int,
    node: np.ndarray,
    near: int,
    helped: np.ndarray,
    tries: int,
    paths: int,
) -> int:
    """The rank that can make most room, up to ``given`` tokens; of alike ones with the fewest helpers, then on the node
    ``near``, then with the least tokens.
    """
    ranks = len(links.held)
    gave, took = np.empty(len(links.expert_head), np.int64), np.empty(ranks, np.int64)
    _search(links, links.quota, links.held, target, NOWHERE, NOWHERE, gave, took, np.empty(ranks, np.int64))
    best, room = -1, 0
    for _ in range(min(tries, ranks)):
        rank = -1
        for other in range(ranks):
            if took[other] == -2 and (rank < 0 or links.held[other] < links.held[rank]):
                rank = other
        if rank < 0:
            break
        took[rank] = -1
        held = links.held.copy()
        held[rank] = max(target, held[rank])
        found = target - links.held[rank]
        if found < given:
            found += _flow(links, links.quota.copy(), held, target, rank, NOWHERE, paths)
        found = min(found, given)
        alike = found == room and best >= 0
        fewer = alike and helped[rank] < helped[best]
        nearer = alike and helped[rank] == helped[best] and node[rank] == near and node[best] != near
        if found > room or fewer or nearer:
            best, room = rank, found
        if room == given and helped[best] == 0 and node[best] == near:
            break
    return best
