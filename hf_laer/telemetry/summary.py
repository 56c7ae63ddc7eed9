"""What a run's records say: each layer's imbalance before and after planning, and under a static layout.

Letters in shapes: B micro-batches of one layer, E experts, N ranks of a token group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_laer.telemetry.record import LayerRecord

# So few layouts are all tried; of more, no more swaps than this are.
TRIES = 4_000
# The search looks at no more micro-batches than this, evenly spread over the run.
SAMPLED = 64


@dataclass(frozen=True)
class LayerSummary:
    """One layer over a run. Every imbalance is max/mean over ranks unless said otherwise.

    Args:
        layer: The experts module's name in the model.
        batches: Training micro-batches seen.
        tokens: Routed tokens in all (a token that goes to K experts counts K times).
        expert_imbalance: Mean over micro-batches of max/mean over experts.
        before_mean: Mean over micro-batches, every expert with its static owner.
        before_max: The worst micro-batch of that.
        static_mean: The same mean under the best static layout for these very loads, found in hindsight.
        after_mean: Mean over micro-batches as planned.
        after_max: The worst micro-batch of that.
        spilled: Share of routed tokens computed away from their expert's owner, 0 to 1.
        moved: Replicas placed on a rank that did not hold the expert just before.
        plan_ms: Median host time of a plan on this rank, milliseconds (the first plan of a process compiles).
        strategy: How the layer ran, as its last micro-batch has it.
    """

    layer: str
    batches: int
    tokens: int
    expert_imbalance: float
    before_mean: float
    before_max: float
    static_mean: float
    after_mean: float
    after_max: float
    spilled: float
    moved: int
    plan_ms: float
    strategy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        return asdict(self)


def by_layer(records: Iterable[LayerRecord]) -> dict[str, list[LayerRecord]]:
    """The records of each layer in order of their micro-batches; layers as they first appear."""
    layers: dict[str, list[LayerRecord]] = {}
    for record in records:
        layers.setdefault(record.layer, []).append(record)
    return {layer: sorted(found, key=lambda record: record.step) for layer, found in layers.items()}


def summarize(records: Iterable[LayerRecord]) -> list[LayerSummary]:
    """One summary per layer, layers as they first appear; empty where there are no records."""
    return [_summary(layer, found) for layer, found in by_layer(records).items()]


def _summary(layer: str, records: list[LayerRecord]) -> LayerSummary:
    loads = np.stack([record.expert_loads for record in records])
    before = imbalances(np.stack([record.loads_before for record in records]))
    after = imbalances(np.stack([record.loads_after for record in records]))
    num_ranks = len(records[0].loads_before)
    static = imbalances(rank_loads(loads, best_static_layout(loads, num_ranks), num_ranks))
    tokens = int(loads.sum())
    return LayerSummary(
        layer=layer,
        batches=len(records),
        tokens=tokens,
        expert_imbalance=float(imbalances(loads).mean()),
        before_mean=float(before.mean()),
        before_max=float(before.max()),
        # The owners' own layout is static too: where the search ends no better, it is the best known.
        static_mean=float(min(static.mean(), before.mean())),
        after_mean=float(after.mean()),
        after_max=float(after.max()),
        spilled=sum(record.spilled for record in records) / tokens if tokens else 0.0,
        moved=sum(record.moved for record in records),
        plan_ms=1e3 * float(np.median([record.plan_seconds for record in records])),
        strategy=records[-1].strategy,
    )


def imbalances(loads: np.ndarray) -> np.ndarray:
    """Max over mean of each row of ``loads [B, N]``; 1.0 where a row has no tokens. float64 ``[B]``."""
    total = loads.sum(-1)
    stretched = loads.max(-1) * loads.shape[-1]
    return np.where(total > 0, stretched / np.maximum(total, 1), 1.0)


def rank_loads(expert_loads: np.ndarray, layout: np.ndarray, num_ranks: int) -> np.ndarray:
    """Tokens per rank ``[B, N]`` of ``expert_loads [B, E]`` where ``layout [E]`` names each expert's rank."""
    return expert_loads @ np.eye(num_ranks, dtype=expert_loads.dtype)[layout]


def best_static_layout(expert_loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """The static layout with the least mean imbalance over all micro-batches, knowing them beforehand.

    No more than ``ceil(E / N)`` experts to a rank, as a static owner has memory for no more. All layouts are
    tried where they are few; else experts go by load to the least loaded rank, then pairs are swapped while
    that helps, which comes near the best but proves nothing.

    Args:
        expert_loads: int64 ``[B, E]``.
        num_ranks: N.

    Returns:
        int64 ``[E]``, the rank of each expert.
    """
    num_experts = expert_loads.shape[1]
    room = math.ceil(num_experts / num_ranks)

    # Floats, as NumPy multiplies whole numbers slowly.
    sample = expert_loads[:: math.ceil(len(expert_loads) / SAMPLED)].astype(np.float64)

    def cost(layout: np.ndarray) -> float:
        return float(imbalances(rank_loads(sample, layout, num_ranks)).mean())

    if num_ranks ** (num_experts - 1) <= TRIES:
        return min(_layouts(num_experts, num_ranks, room), key=cost)
    return _swapped(_greedy(expert_loads.sum(0), num_ranks, room), cost)


def _layouts(num_experts: int, num_ranks: int, room: int) -> Iterator[np.ndarray]:
    """Every layout in which no rank holds more than ``room``, but for the names of the ranks."""
    for code in range(num_ranks ** (num_experts - 1)):
        layout = np.array([code // num_ranks**place % num_ranks for place in range(num_experts)])[::-1]
        if np.bincount(layout, minlength=num_ranks).max() <= room:
            yield layout


def _greedy(totals: np.ndarray, num_ranks: int, room: int) -> np.ndarray:
    layout = np.zeros(len(totals), np.int64)
    loads, held = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    for expert in np.argsort(-totals, kind="stable"):
        rank = int(np.where(held < room, loads, np.inf).argmin())
        layout[expert] = rank
        loads[rank] += totals[expert]
        held[rank] += 1
    return layout


def _swapped(layout: np.ndarray, cost: Callable[[np.ndarray], float]) -> np.ndarray:
    """Swaps pairs of experts, each kept if the cost falls, until none helps or the tries are used."""
    best, least, unhelpful = layout, cost(layout), 0
    pairs = list(itertools.combinations(range(len(layout)), 2))
    for one, other in itertools.islice(itertools.cycle(pairs), TRIES):
        swapped = best.copy()
        swapped[one], swapped[other] = best[other], best[one]
        found = least if best[one] == best[other] else cost(swapped)
        best, least, unhelpful = (swapped, found, 0) if found < least else (best, least, unhelpful + 1)
        if unhelpful == len(pairs):
            break
    return best
