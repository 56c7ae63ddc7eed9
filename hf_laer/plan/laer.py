"""LAER's re-layout: candidate replica counts, the greedy placement of each, the cheapest wins (arXiv
2602.11686).
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .copies import even_copies, greedy_copies, moved_copy, proportional_copies
from .forecast import HEDGE
from .pinned import first_homes, with_replicas
from .relayout import place_copies
from .types import Placement
from .validate import check_history, check_room, node_width

# Copies by: one at a time, evenly, by share, a node's worth at a time. Further candidates move one copy of
# the first three.
BASES = 4


def laer_placement(
    loads: np.ndarray,
    num_ranks: int,
    slots_per_rank: int,
    ranks_per_node: int | None = None,
    *,
    candidates: int = 6,
    remote_permille: int = 500,
    hedge_permille: int = 0,
) -> Placement:
    """Places experts for loads like ``loads`` (LAER-MoE, arXiv 2602.11686, section 4 and Algorithm 1).

    Args:
        loads: int64 ``[E]`` tokens per expert, or ``[N, E]`` per source rank and expert, of recent steps.
        num_ranks: N, the ranks of one token group.
        slots_per_rank: S, the experts that a rank unshards.
        ranks_per_node: Consecutive ranks that share a node (the last may have fewer); ``None``: one node.
        candidates: How many replica counts to try; the first four are by priority queue, even, proportional,
            and by priority queue with a node's worth at a time, then come moves of a single copy.
        remote_permille: What a token that leaves its node costs, in thousandths of a token's compute.
        hedge_permille: Thousandths of each load replaced by the mean load, as the next step may differ.

    Returns:
        The candidate with the smallest sum of the most loaded rank's tokens (under LAER's own dispatch, see
        :func:`laer`) and the priced mean of tokens that leave their node. Every expert is placed, none twice
        on one rank, and ``min(N * S, N * E)`` slots are used.

    Raises:
        ValueError: Bad loads, too few slots, fewer than one candidate, or a share outside its range.
    """
    loads = check_history(loads, num_ranks)
    check_room(loads.shape[1], num_ranks, slots_per_rank)
    if candidates < 1 or remote_permille < 0:
        raise ValueError(f"need candidates >= 1 and remote_permille >= 0, got {candidates} and {remote_permille}")
    if not 0 <= hedge_permille <= 1000:
        raise ValueError(f"hedge_permille={hedge_permille} must lie in 0..1000")
    if hedge_permille:
        loads = hedged(loads, int(hedge_permille))
    slots = min(int(slots_per_rank), loads.shape[1])
    width = node_width(ranks_per_node, num_ranks)
    load = loads.sum(axis=0)
    return Placement(_cheapest(loads, load, int(num_ranks), slots, width, int(candidates), int(remote_permille)))


def fsep_placement(
    loads: np.ndarray,
    num_ranks: int,
    slots_per_rank: int,
    ranks_per_node: int | None = None,
    *,
    hedge_permille: int = HEDGE,
) -> Placement:
    """Places experts for the exact split: a first copy of each, equally many per rank, then others by priority queue.

    The split levels what a placement allows, so a placement should allow much. Further copies are placed one after the
    other, as :func:`replica_placement` does it: LAER's own order (arXiv 2602.11686), all copies of one expert at a
    time, puts the coldest experts together, and what the exact split cannot level is about twice as much. Copies follow
    three quarters of the recent loads and one quarter of their mean, or more of it where forecasts miss by much
    (``hedge_permille``, see :attr:`hf_laer.plan.forecast.Forecaster.hedge`). Candidates chosen for less traffic did
    worse (measured, see ``docs/planners.md``).

    Args:
        loads: int64 ``[E]`` or ``[N, E]``, as :func:`laer_placement`.
        num_ranks: N.
        slots_per_rank: S.
        ranks_per_node: Consecutive ranks that share a node; ``None``: one node.
        hedge_permille: Thousandths of the loads that are replaced by their mean.

    Returns:
        A placement of every expert, none twice on one rank; slots stay empty only where all ranks with a free one hold
        all experts that could fill it.

    Raises:
        ValueError: Bad loads, too few slots, or a share outside its range.
    """
    load = check_history(loads, num_ranks).sum(axis=0)
    check_room(len(load), num_ranks, slots_per_rank)
    if not 0 <= hedge_permille <= 1000:
        raise ValueError(f"hedge_permille={hedge_permille} must lie in 0..1000")
    slots, width = min(int(slots_per_rank), len(load)), node_width(ranks_per_node, num_ranks)
    wanted = hedged(load[None], int(hedge_permille))[0] + 1  # experts without load get copies too, last
    room = int(num_ranks) * slots - len(load)
    owners = first_homes(wanted, int(num_ranks), slots, width)
    return Placement(with_replicas(wanted, owners, int(num_ranks), slots, width, room))


def initial_placement(num_experts: int, num_ranks: int, slots: int, ranks_per_node: int | None = None) -> Placement:
    """A placement before any load is known: copies as equal as can be, dealt over nodes and ranks.

    Where ``slots`` is just ``ceil(E / N)`` each expert is placed once and the slots left over stay empty (30
    experts
    on 8 ranks: 4, 4, 4, 4, 4, 4, 3, 3); with more, every slot is used.

    Raises:
        ValueError: Too few slots to hold every expert once.
    """
    check_room(num_experts, num_ranks, slots)
    width = node_width(ranks_per_node, num_ranks)
    room = num_ranks * min(slots, num_experts) if slots > -(-num_experts // num_ranks) else num_experts
    copies = even_copies(num_experts, num_ranks, room)
    nothing = np.zeros(num_experts, np.int64)
    return Placement(place_copies(nothing, copies, num_ranks, min(slots, num_experts), width))


@kernel
def hedged(loads: np.ndarray, permille: int) -> np.ndarray:
    """Each source's loads drawn towards their mean, in thousandths of a token where that fits."""
    experts = loads.shape[1]
    scale = 1000 if loads.sum() < 1 << 40 else 1
    hedged = np.empty_like(loads)
    for source in range(len(loads)):
        mean = loads[source].sum() * scale // experts
        for expert in range(experts):
            load = loads[source, expert] * scale
            hedged[source, expert] = load - load // 1000 * permille + mean // 1000 * permille
    return hedged


@kernel
def _cheapest(
    loads: np.ndarray,
    load: np.ndarray,
    ranks: int,
    slots: int,
    width: int,
    candidates: int,
    remote_permille: int,
) -> np.ndarray:
    by_node = _node_loads(loads, ranks, width)
    best = np.empty((ranks, slots), np.int64)
    lowest = -1
    for candidate in range(candidates):
        copies = _copies(candidate, load, ranks, ranks * slots, -(-ranks // width))
        table = place_copies(load, copies, ranks, slots, width)
        cost = _cost(table, load, copies, by_node, width, remote_permille)
        if lowest < 0 or cost < lowest:
            lowest, best = cost, table
    return best


@kernel
def _copies(candidate: int, load: np.ndarray, ranks: int, room: int, nodes: int) -> np.ndarray:
    base = candidate if candidate < BASES else (candidate - BASES) % (BASES - 1)
    if base == 0:
        copies = greedy_copies(load, ranks, room, ranks + 1)
    elif base == 1:
        copies = even_copies(len(load), ranks, room)
    elif base == 2:
        copies = proportional_copies(load, ranks, room)
    else:
        copies = greedy_copies(load, ranks, room, nodes)
    return copies if candidate < BASES else moved_copy(copies, ranks, candidate)


@kernel
def _node_loads(loads: np.ndarray, ranks: int, width: int) -> np.ndarray:
    """Tokens per source node and expert, ``[nodes, E]``; sources that are not known are taken as even."""
    nodes = -(-ranks // width)
    by_node = np.zeros((nodes, loads.shape[1]), np.int64)
    if len(loads) < ranks:
        for node in range(nodes):
            by_node[node] = loads[0] * (min((node + 1) * width, ranks) - node * width) // ranks
    else:
        for rank in range(ranks):
            by_node[rank // width] += loads[rank]
    return by_node


@kernel
def _cost(
    table: np.ndarray, load: np.ndarray, copies: np.ndarray, by_node: np.ndarray, width: int, permille: int
) -> int:
    """The most loaded rank under LAER's dispatch plus the priced tokens that leave their node, per rank.

    In fixed point: copies on the source's node share its tokens, all copies share those of nodes without one.
    """
    scale = 1 << 20 if load.sum() < 1 << 40 else 1
    nodes, experts = by_node.shape
    near = np.zeros((nodes, experts), np.int64)
    for rank in range(table.shape[0]):
        for expert in table[rank]:
            if expert >= 0:
                near[rank // width, expert] += 1
    foreign = np.zeros(experts, np.int64)
    for node in range(nodes):
        for expert in range(experts):
            if near[node, expert] == 0:
                foreign[expert] += by_node[node, expert]
    highest = 0
    for rank in range(table.shape[0]):
        node, held = rank // width, 0
        for expert in table[rank]:
            if expert >= 0:
                held += by_node[node, expert] * scale // near[node, expert]
                held += foreign[expert] * scale // copies[expert]
        highest = max(highest, held)
    return highest + foreign.sum() * scale // (table.shape[0] * 1000) * permille
