"""The two corners of the plan space, which look at no load: whole experts at their owners, or everything
everywhere.
"""

from __future__ import annotations

import numpy as np

from .owners import owner_slots
from .types import Placement, Plan, Split
from .validate import check_loads, check_owners


def ep(loads: np.ndarray, owners: np.ndarray) -> Plan:
    """Plain expert parallelism (GShard, arXiv 2006.16668): every token goes to its expert's owner.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``, the rank that owns each expert.

    Returns:
        A plan whose slot rows list the rank's own experts, ascending; one replica per expert.

    Raises:
        ValueError: See :func:`check_loads` and :func:`check_owners`.
    """
    loads = check_loads(loads)
    ranks, experts = loads.shape
    owners = check_owners(owners, ranks, experts)
    slots, slot_of = owner_slots(owners, ranks, np.zeros(ranks, np.int64))
    split = Split(np.arange(experts + 1), owners, slot_of, loads.sum(axis=0))
    return Plan(Placement(slots), split)


def fsdp(loads: np.ndarray) -> Plan:
    """Fully sharded data parallelism (arXiv 2304.11277): every expert on every rank, no token leaves its
    rank.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.

    Returns:
        A plan with ``E`` slots per rank and ``N`` replicas per expert, each serving its own rank's tokens.

    Raises:
        ValueError: See :func:`check_loads`.
    """
    loads = check_loads(loads)
    ranks, experts = loads.shape
    split = Split(
        first=np.arange(experts + 1) * ranks,
        rank=np.tile(np.arange(ranks), experts),
        slot=np.repeat(np.arange(experts), ranks),
        end=np.ascontiguousarray(np.cumsum(loads, axis=0).T).ravel(),
    )
    return Plan(Placement(np.tile(np.arange(experts), (ranks, 1))), split)
