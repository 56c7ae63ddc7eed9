"""What one MoE layer did for one micro-batch, in plain numbers, and where such records gather."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_laer.plan import chunk_owners, gained, holders, owner_loads
from hf_laer.plan.types import Plan

# Told of each layer and training micro-batch: the layer's name, the loads int64 [N, E] of all ranks of the world, and
# K. All ranks have one or none, since gathering these loads is collective.
LoadsWatcher = Callable[[str, np.ndarray, int], None]


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One layer and training micro-batch. Every field but ``plan_seconds`` is the same on all ranks of a
    token group; groups, and the replicas of an HSDP mesh, have their own loads.

    Args:
        layer: The experts module's name in the model.
        step: Training micro-batches that the layer had seen before.
        expert_loads: int64 ``[E]``, routed tokens per expert over all ranks of this rank's token group.
        loads_before: int64 ``[N]``, tokens per rank if every expert stayed with its static owner.
        loads_after: int64 ``[N]``, tokens per rank as planned.
        spilled: Tokens computed away from their expert's owner (``llep``), else 0.
        moved: Replicas that sit on a rank which did not hold the expert in the layer's previous placement.
        plan_seconds: Host time of the plan on this rank.
        forecast: The forecast that the layer's next layout is made by, where it is re-laid out.
        strategy: How the layer runs.
    """

    layer: str
    step: int
    expert_loads: np.ndarray
    loads_before: np.ndarray
    loads_after: np.ndarray
    spilled: int
    moved: int
    plan_seconds: float
    forecast: str = ""
    strategy: str = ""


def holders_of(plans: Sequence[Plan], experts: int) -> np.ndarray:
    """bool ``[N, E]``: which rank holds which expert, the token groups' plans one after the other."""
    return np.concatenate([holders(plan.placement.slots, experts) for plan in plans])


def record_of(
    layer: str,
    step: int,
    held: np.ndarray,
    before: np.ndarray,
    group: np.ndarray,
    plans: Sequence[Plan],
    mine: Plan,
    *,
    plan_seconds: float,
    forecast: str,
    strategy: str,
) -> LayerRecord:
    """The record of one micro-batch.

    Args:
        layer: Its name.
        step: See :class:`LayerRecord`, as for what is not told here.
        held: bool ``[N, E]``, who holds which expert.
        before: Likewise, in the micro-batch before.
        group: int64 ``[N, E]``, the loads of this rank's token group.
        plans: Of all token groups that are known here.
        mine: That of this rank's.
        plan_seconds: See :class:`LayerRecord`.
        forecast: Likewise.
        strategy: Likewise.
    """
    expert_loads, before_plan = owner_loads(group, chunk_owners(group.shape[1], len(group)))
    spilled, moved = sum(plan.spilled for plan in plans), int(gained(held, before))
    counted = expert_loads, before_plan, mine.rank_loads, spilled, moved
    return LayerRecord(layer, step, *counted, plan_seconds, forecast, strategy)


class Recorder:
    """Keeps the latest ``capacity`` records; :meth:`drain` hands over those not yet drained.

    Args:
        capacity: Records kept; older ones fall out, so that a long run's memory stays flat.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._records: deque[LayerRecord] = deque(maxlen=capacity)

    def add(self, record: LayerRecord) -> None:
        """Appends one record."""
        self._records.append(record)

    def drain(self) -> list[LayerRecord]:
        """All records since the last drain, oldest first."""
        drained = list(self._records)
        self._records.clear()
        return drained
