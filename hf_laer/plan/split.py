"""The exact split: for a given placement and the loads that are really there, none has a lower maximum."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .least_traffic import level_cheaply
from .levelling import level
from .network import Network, copied, network
from .ranges import stream_ranges
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
        A rank's tokens stay there as far as its replica's share lets them. A replica is listed once per range of
        the stream that it serves; one among several of an expert not at all if it serves none.

    Raises:
        ValueError: Bad loads or placement, an expert with tokens that no rank holds, or a negative slack.
    """
    loads = check_loads(loads)
    slots = check_placement(placement, *loads.shape)
    width = node_width(ranks_per_node, len(loads))
    if slack < 0:
        raise ValueError(f"slack={slack} must not be negative")
    *parts, homeless = _split(loads, slots, width, int(slack))
    check_homes(loads, homeless)
    return Split(*parts)


def fsep(loads: np.ndarray, placement: Placement, ranks_per_node: int | None = None, *, slack: int = 0) -> Plan:
    """FSEP's plan: a placement made from recent loads, and the exact split of the loads that are there now.

    Placement after LAER-MoE (arXiv 2602.11686); see :func:`exact_split` for arguments and errors.
    """
    return Plan(placement, exact_split(loads, placement, ranks_per_node, slack=slack))


def check_homes(loads: np.ndarray, homeless: int) -> None:
    """Raises ``ValueError`` if ``homeless`` is an expert, which then has tokens but no rank."""
    if homeless >= 0:
        tokens = int(loads[:, homeless].sum())
        raise ValueError(f"expert {homeless} has {tokens} tokens, but no rank holds it")


@kernel
def _split(
    loads: np.ndarray, slots: np.ndarray, width: int, slack: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """first, rank, slot and end, and an expert that has tokens but no replica (or -1)."""
    net, homeless = network(loads, slots, width)
    if homeless >= 0:
        return net.first, net.rank, net.slot, net.quota, homeless
    level_exactly(net, loads, slack)
    return (*stream_ranges(loads, net.first, net.rank, net.slot, net.quota, width), -1)


@kernel
def level_exactly(net: Network, loads: np.ndarray, slack: int) -> None:
    """Moves quotas to the least maximum that the placement allows plus ``slack``, at the least traffic."""
    own = np.zeros(len(net.rank), np.int64)
    if len(net.sent) == 1:
        for at in range(len(own)):
            own[at] = min(loads[net.rank[at], net.expert[at]], net.quota[at])
        level(net, own, slack)
        return
    target = level(copied(net), own, slack)
    level_cheaply(net, target)
    if net.held.max() > target:
        level(net, own, slack)
