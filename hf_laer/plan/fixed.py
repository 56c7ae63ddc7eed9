"""Planners that look at no load: experts at their owners, everything everywhere, and a static mix."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .owners import chunk_owners, owner_loads, owner_slots
from .types import Placement, Plan, Split
from .validate import check_loads, check_owners, check_room


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
    return at_owners(loads, check_owners(owners, ranks, experts))


def at_owners(loads: np.ndarray, owners: np.ndarray) -> Plan:
    """:func:`ep` of what has been checked."""
    slots, first, slot_of, totals = _at_owners(loads, owners)
    return Plan(Placement(slots), Split(first, owners, slot_of, totals))


@kernel
def _at_owners(loads: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    slots, slot_of = owner_slots(owners, len(loads), np.zeros(len(loads), np.int64))
    return slots, np.arange(len(owners) + 1), slot_of, owner_loads(loads, owners)[0]


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


def fsdp_ep(loads: np.ndarray, slots_per_rank: int) -> Plan:
    """Static FSDP + EP (LAER-MoE's baseline, arXiv 2602.11686): equal groups of ranks, each an EP group.

    A group is the fewest consecutive ranks, a divisor of N, whose slots hold every expert. Experts are owned
    by the chunk rule inside each group, tokens stay in it, copies of an expert are sharded over the groups.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        slots_per_rank: S.

    Raises:
        ValueError: Bad loads, or too few slots.
    """
    loads = check_loads(loads)
    ranks, experts = loads.shape
    check_room(experts, ranks, slots_per_rank)
    size = next(n for n in range(1, ranks + 1) if ranks % n == 0 and -(-experts // n) <= slots_per_rank)
    owners = chunk_owners(experts, size)
    groups = ranks // size
    slots, slot_of = owner_slots(owners, size, np.zeros(size, np.int64))
    by_group = loads.reshape(groups, size, experts).sum(axis=1)
    split = Split(
        first=np.arange(experts + 1) * groups,
        rank=(owners[:, None] + np.arange(groups) * size).ravel(),
        slot=np.repeat(slot_of, groups),
        end=np.ascontiguousarray(np.cumsum(by_group, axis=0).T).ravel(),
    )
    return Plan(Placement(np.tile(slots, (groups, 1))), split)
