"""Loads to choose a strategy by: what routers of a model in training send, and what a hot expert does to them.

Whole numbers only, so that all ranks make the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hf_laer.choice import LayerSizes


@dataclass(frozen=True)
class Loads:
    """Loads to choose by.

    Args:
        name: For tables.
        now: int64 ``[N, E]``, what the plans serve.
        expected: int64 ``[N, E]``, what was forecast.
    """

    name: str
    now: np.ndarray
    expected: np.ndarray


def usual_loads(sizes: LayerSizes, ranks: int, tokens: int) -> list[Loads]:
    """What routers of a model in training send: even loads, and skewed ones of which a quarter was not foreseen."""
    total = tokens * sizes.top_k
    even = _spread(total, np.ones(sizes.experts, np.int64))
    falling = (1 << 20) // (np.arange(sizes.experts, dtype=np.int64) + 2 + sizes.experts // 8)
    # Neighbours in popularity live apart, as they do in a trained model.
    scattered = falling[_stride(sizes.experts)]
    changed = 3 * scattered + scattered[::-1]
    now, before = (_rolled(_spread(total, weights), ranks) for weights in (changed, scattered))
    return [Loads("even", (both := _rolled(even, ranks)), both), Loads("skewed", now, before)]


def hot_loads(sizes: LayerSizes, ranks: int, tokens: int, share: int, hot: int, of: int = 100) -> Loads:
    """``share`` in ``of`` of all choices go to the first ``hot`` experts, evenly; the rest to the others."""
    total = tokens * sizes.top_k
    counts = np.zeros(sizes.experts, np.int64)
    many = total * share // of if hot < sizes.experts else total
    counts[:hot] = _spread(many, np.ones(hot, np.int64))
    if hot < sizes.experts:
        counts[hot:] = _spread(total - many, np.ones(sizes.experts - hot, np.int64))
    now = np.tile(counts, (ranks, 1))
    return Loads(f"{share}/{of}:{hot}", now, now)


def _spread(total: int, weights: np.ndarray) -> np.ndarray:
    """``total`` in whole parts in proportion to ``weights``; what is left over goes to the first ones."""
    parts = total * weights // int(weights.sum())
    parts[: total - int(parts.sum())] += 1
    return parts


def _rolled(counts: np.ndarray, ranks: int) -> np.ndarray:
    """The same counts on every rank."""
    return np.tile(counts, (ranks, 1))


def _stride(size: int) -> np.ndarray:
    """A permutation that puts neighbours apart."""
    step = next(step for step in range(max(1, size * 5 // 8), 2 * size + 2) if np.gcd(step, size) == 1)
    return np.arange(size, dtype=np.int64) * step % size
