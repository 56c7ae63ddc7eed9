"""Token groups: planners see the ranks of one group; here the groups' plans become one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .types import EMPTY, Placement, Plan, Split


def join_groups(plans: Sequence[Plan], loads: np.ndarray) -> Plan:
    """One plan over all ranks from the plans of consecutive, disjoint groups that together are all ranks.

    Args:
        plans: One per group, made from that group's rows of ``loads`` alone.
        loads: int64 ``[N, E]``, all ranks.

    Raises:
        ValueError: The groups' ranks do not add up to N.
    """
    sizes = [plan.placement.num_ranks for plan in plans]
    if sum(sizes) != len(loads):
        raise ValueError(f"groups of {sizes} ranks do not make {len(loads)}")
    starts = np.cumsum([0, *sizes[:-1]])
    before = np.cumsum([loads[start : start + size].sum(axis=0) for start, size in zip(starts, sizes, strict=True)], 0)
    before = np.concatenate([np.zeros((1, loads.shape[1]), np.int64), before[:-1]])
    expert = [np.repeat(np.arange(loads.shape[1]), np.diff(plan.split.first)) for plan in plans]
    order = np.argsort(np.concatenate(expert), kind="stable")
    parts = list(zip(plans, starts, before, expert, strict=True))
    split = Split(
        first=np.sum([plan.split.first for plan in plans], axis=0),
        rank=np.concatenate([plan.split.rank + start for plan, start, _, _ in parts])[order],
        slot=np.concatenate([plan.split.slot for plan in plans])[order],
        end=np.concatenate([plan.split.end + earlier[of] for plan, _, earlier, of in parts])[order],
    )
    return Plan(stack_groups([plan.placement for plan in plans]), split, sum(plan.spilled for plan in plans))


def stack_groups(placements: Sequence[Placement]) -> Placement:
    """One placement over all ranks: the groups' slot tables above each other, filled up with empty slots."""
    width = max(placement.slots.shape[1] for placement in placements)
    tables = [
        np.pad(placement.slots, ((0, 0), (0, width - placement.slots.shape[1])), constant_values=EMPTY)
        for placement in placements
    ]
    return Placement(np.concatenate(tables))
