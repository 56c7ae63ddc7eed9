"""EPLB: redundant experts packed so that ranks are even, flat or node by node; and LPLB's split over them."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .copies import greedy_copies
from .order import descending
from .relayout import place_copies
from .shares import even_split
from .split import exact_split
from .types import Placement, Plan
from .validate import check_history, check_room, node_width


def eplb_placement(
    loads: np.ndarray,
    num_ranks: int,
    slots_per_rank: int,
    ranks_per_node: int | None = None,
    *,
    expert_groups: int | None = None,
) -> Placement:
    """EPLB's placement (github.com/deepseek-ai/EPLB): copies for the hottest, longest first to the least
    loaded.

    Flat by default. With ``expert_groups`` (the router's groups of consecutive experts) that divide over the
    nodes it
    is hierarchical: groups are packed onto nodes, copies are made and packed inside each node. Unlike the
    reference, no rank gets two copies of one expert.

    Args:
        loads: int64 ``[E]`` or ``[N, E]``, recent loads.
        num_ranks: N.
        slots_per_rank: S.
        ranks_per_node: Consecutive ranks that share a node.
        expert_groups: Groups of experts; ``None`` or a number that does not divide E or over the nodes: flat.

    Raises:
        ValueError: Bad loads or too few slots.
    """
    load = check_history(loads, num_ranks).sum(axis=0)
    experts, width = len(load), node_width(ranks_per_node, num_ranks)
    check_room(experts, num_ranks, slots_per_rank)
    slots, nodes = min(slots_per_rank, experts), -(-num_ranks // width)
    groups = expert_groups or 1
    divides = experts % groups == 0 and groups % nodes == 0 and num_ranks % width == 0
    if expert_groups is None or not divides or experts // nodes > slots * width:
        copies = greedy_copies(load, num_ranks, num_ranks * slots, num_ranks + 1)
        return Placement(place_copies(load, copies, num_ranks, slots, num_ranks))
    by_group = load.reshape(groups, -1).sum(axis=1)
    node_of = _pack(by_group, nodes, groups // nodes)
    members = np.arange(experts).reshape(groups, -1)
    slots = min(slots, experts // nodes)
    tables = []
    for node in range(nodes):
        mine = members[node_of == node].ravel()
        copies = greedy_copies(load[mine], width, width * slots, width + 1)
        tables.append(mine[place_copies(load[mine], copies, width, slots, width)])
    return Placement(np.concatenate(tables))


def eplb(loads: np.ndarray, placement: Placement) -> Plan:
    """EPLB's dispatch over a given placement (github.com/deepseek-ai/EPLB): copies share an expert evenly.

    Published for serving (DeepSeek-V3, arXiv 2412.19437, section 3.4). See :func:`even_split` for errors.
    """
    return Plan(placement, even_split(loads, placement))


def lplb(loads: np.ndarray, placement: Placement, ranks_per_node: int | None = None) -> Plan:
    """LPLB's split (github.com/deepseek-ai/LPLB, beside EPLB of arXiv 2412.19437): the linear programme's
    optimum.

    Minimal maximum over a fixed graph of replicas. Its optimum is a parametric flow, solved here in integers
    by :func:`exact_split`, which also lists the errors. The published solver ignores that small groups are
    slow; so does this.
    """
    return Plan(placement, exact_split(loads, placement, ranks_per_node))


@kernel
def _pack(load: np.ndarray, bins: int, each: int) -> np.ndarray:
    """int64: the bin of each item, longest first to the least loaded bin that has fewer than ``each``."""
    held = np.zeros(bins, np.int64)
    count = np.zeros(bins, np.int64)
    bin_of = np.empty(len(load), np.int64)
    for item in descending(load):
        best = -1
        for place in range(bins):
            if count[place] < each and (best < 0 or held[place] < held[best]):
                best = place
        bin_of[item] = best
        held[best] += load[item]
        count[best] += 1
    return bin_of
