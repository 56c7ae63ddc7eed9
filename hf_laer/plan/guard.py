"""A plan for this very step may be refused: where ``ep`` is predicted to be faster, ``ep`` it is."""

from __future__ import annotations

import numpy as np

from .cost import CostModel, predict, seconds_of
from .fixed import ep
from .types import Placement, Plan


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


def cheaper(
    plan: Plan,
    plain: Plan,
    loads: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    owners: np.ndarray | None = None,
    foreseen: Placement | None = None,
) -> Plan:
    """``plan`` or, unless it is predicted to take less time, ``plain``. Neither gets its prediction.

    Args:
        plan: Made from ``loads``.
        plain: Likewise, and simpler.
        loads: int64 ``[N, E]``, what both serve.
        cost: Layer and machine.
        home: Where weights live, as :func:`predict` knows it.
        owners: int64 ``[E]``, where there are any.
        foreseen: The placement that was known ahead, if any.

    Raises:
        ValueError: As :func:`predict`.
    """
    planned, simple = (
        seconds_of(one, loads, cost, home=home, owners=owners, foreseen=foreseen) for one in (plan, plain)
    )
    return plan if planned < simple else plain
