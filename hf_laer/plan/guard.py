"""A plan for this very step may be refused: where ``ep`` is predicted to be faster, ``ep`` it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cost import CostModel, predict, seconds_of
from .fixed import ep
from .types import Placement, Plan

# The one that fetches more experts costs what is not modelled: kernels, and memory.
WORTH = 1.01


def no_worse_than_ep(
    plan: Plan,
    loads: np.ndarray,
    owners: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    foreseen: Placement | None = None,
) -> Plan:
    """``plan`` or, if that is predicted to take less time with weights in the same home, :func:`ep`'s.

    Moving weights does not pay where batches are small or balance is good already; the cost model sees it.

    Args:
        plan: Made from ``loads``.
        loads: int64 ``[N, E]``, what the plan serves.
        owners: int64 ``[E]``.
        cost: Layer and machine.
        home: Where weights live, as :func:`predict` knows it.
        foreseen: The placement that was known ahead, if any.

    Returns:
        The cheaper one, with its prediction; ``plan`` if they are equal.

    Raises:
        ValueError: As :func:`predict` and :func:`ep`.
    """
    planned = predict(plan, loads, cost, home=home, owners=owners, foreseen=foreseen)
    plain = predict(ep(loads, owners), loads, cost, home=home, owners=owners)
    assert planned.predicted is not None
    assert plain.predicted is not None
    return planned if planned.predicted.seconds <= plain.predicted.seconds else plain


def cheapest(
    plans: Sequence[Plan],
    loads: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    owners: np.ndarray | None = None,
    foreseen: Placement | None = None,
) -> Plan:
    """The plan that is predicted to take the least time. None gets its prediction; of one plan nothing is asked.

    Args:
        plans: Made from ``loads``, simpler ones first. Of two that spill, the later one must be faster by a hundredth.
        loads: int64 ``[N, E]``, what they serve.
        cost: Layer and machine.
        home: Where weights live, as :func:`predict` knows it.
        owners: int64 ``[E]``, where there are any.
        foreseen: The placement that was known ahead, if any.

    Raises:
        ValueError: As :func:`predict`.
    """
    if len(plans) == 1:
        return plans[0]
    seconds = predicted_seconds(plans, loads, cost, home=home, owners=owners, foreseen=foreseen)
    best = 0
    for at in range(1, len(plans)):
        margin = WORTH if plans[best].spilled and plans[at].spilled else 1
        best = at if seconds[at] * margin < seconds[best] else best
    return plans[best]


def predicted_seconds(
    plans: Sequence[Plan],
    loads: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    owners: np.ndarray | None = None,
    foreseen: Placement | None = None,
) -> list[float]:
    """What each is predicted to take, in seconds; one that is there twice is asked once. See :func:`cheapest`."""
    known: dict[Plan, float] = {}
    for plan in plans:
        if plan not in known:
            known[plan] = seconds_of(plan, loads, cost, home=home, owners=owners, foreseen=foreseen)
    return [known[plan] for plan in plans]
