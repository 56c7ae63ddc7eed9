"""What a plan means for one rank, and who holds what, read off in compiled code: a step does it in every layer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .types import EMPTY, Plan


class OwnPart(NamedTuple):
    """One rank's part of a plan, known to every rank before anything travels.

    Args:
        sent: int64 ``[N]``, choices (token, expert) from this rank to each rank.
        received: int64 ``[N]``, choices from each rank to this one.
        slots: int64 ``[S']``, tokens in each of this rank's filled slots.
    """

    sent: np.ndarray
    received: np.ndarray
    slots: np.ndarray


def own_part(plan: Plan, loads: np.ndarray, rank: int) -> OwnPart:
    """The part of ``rank`` in the plan made from ``loads`` int64 ``[N, E]``."""
    split, slots = plan.split, len(plan.placement.held_by(rank))
    return OwnPart(*_own_part(loads, split.first, split.rank, split.slot, split.end, rank, slots))


@kernel
def _own_part(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, slot: np.ndarray, end: np.ndarray, me: int, slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ranks, experts = loads.shape
    sent, received, counts = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(slots, np.int64)
    for expert in range(experts):
        at, begin = first[expert], 0
        for source in range(ranks):
            tokens = loads[source, expert]
            while tokens > 0:
                while end[at] <= begin:
                    at += 1
                take = min(tokens, end[at] - begin)
                if source == me:
                    sent[rank[at]] += take
                if rank[at] == me:
                    received[source] += take
                    counts[slot[at]] += take
                begin += take
                tokens -= take
    return sent, received, counts


@kernel
def holders(slots: np.ndarray, experts: int) -> np.ndarray:
    """bool ``[N, E]``: which rank holds which expert, from slots int64 ``[N, S]``."""
    held = np.zeros((len(slots), experts), np.bool_)
    for rank in range(len(slots)):
        for expert in slots[rank]:
            if expert != EMPTY:
                held[rank, expert] = True
    return held


@kernel
def gained(held: np.ndarray, before: np.ndarray) -> int:
    """How many experts ranks hold that they did not hold before, both as :func:`holders` gives them."""
    count = 0
    for rank in range(len(held)):
        for expert in range(held.shape[1]):
            count += held[rank, expert] and not before[rank, expert]
    return count
