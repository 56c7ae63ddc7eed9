"""What the engine reads off plans: which experts are in which slots, and hashes of it."""

from __future__ import annotations

import numpy as np

from hf_laer.plan.types import EMPTY, Placement, Plan, digest_of
from hf_laer.shard.exchange import SlotTable


def table_of(placements: list[Placement]) -> SlotTable:
    """The experts in each rank's slots, group after group."""
    return tuple([_held(row) for one in placements for row in one.slots.tolist()])


def _held(row: list[int]) -> tuple[int, ...]:
    """As :meth:`Placement.held_by`; empty slots trail."""
    return tuple(row[: row.index(EMPTY)] if EMPTY in row[-1:] else row)


def digests(loads: np.ndarray, plans: list[Plan]) -> dict[str, str]:
    """What all ranks must have alike in a plan, each part by a hash."""
    splits = [part for plan in plans for part in (plan.split.first, plan.split.rank, plan.split.slot, plan.split.end)]
    parts = {"loads": [loads], "placement": [plan.placement.slots for plan in plans], "split": splits}
    return {name: digest_of(*arrays)[:12] for name, arrays in parts.items()}
