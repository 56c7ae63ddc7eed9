"""The next micro-batch's loads from recent ones, in whole tokens: every rank forecasts the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

FORECASTS = ("last", "mean", "ema", "trend")
# Thousandths of the loads that a placement replaces by their mean, at least and at most.
HEDGE, HIGHEST_HEDGE = 250, 550
# Forecasts that differ by less than so many millionths of the tokens ask for the same placement.
SETTLED = 10_000


def forecast(name: str, history: Sequence[np.ndarray]) -> np.ndarray:
    """Loads to expect next.

    Args:
        name: ``last`` repeats the latest loads, ``mean`` takes the mean of all given, ``ema`` their exponential
            mean, each counting twice the one before it, ``trend`` goes on along the least-squares line.
        history: int64 ``[N, E]`` each, oldest first; at least one.

    Returns:
        int64 ``[N, E]``, at least 0.

    Raises:
        ValueError: There is no such forecast, or no history.
    """
    if name not in FORECASTS or not history:
        raise ValueError(f"forecast {name!r} of {len(history)} loads: one of {', '.join(FORECASTS)}, of at least one")
    weights = _weights(name, len(history))
    total = sum(int(weight) * loads for weight, loads in zip(weights, history, strict=True))
    return np.maximum(np.asarray(total, np.int64) // int(weights.sum()), 0)


def _weights(name: str, length: int) -> np.ndarray:
    """int64 ``[length]``, in proportion; their sum is above 0."""
    at = np.arange(length)
    if name == "mean":
        return np.ones(length, np.int64)
    if name == "ema":
        # Beyond sixteen the oldest would weigh less than a token in thousands, and the newest leave int64.
        power = at - max(length - 16, 0)
        return np.where(power < 0, 0, 1 << np.maximum(power, 0))
    if name == "trend" and length > 1:
        # The least-squares line through points 0 to n - 1, at n.
        return 3 * at - (length - 1)
    return (at == length - 1).astype(np.int64)


def miss(expected: np.ndarray, loads: np.ndarray) -> int:
    """How far a forecast was off: millionths of the tokens that another expert got than expected.

    Totals over source ranks are compared, in shares, as a placement follows shares.
    """
    share = [per_expert.sum(0) * 1_000_000 // max(int(per_expert.sum()), 1) for per_expert in (expected, loads)]
    return int(np.abs(share[0] - share[1]).sum()) // 2


class Forecaster:
    """Recent loads, and the forecast that has missed by least so far.

    Args:
        window: Loads that are kept.
        name: One of ``FORECASTS``, or ``auto``.
    """

    def __init__(self, window: int, name: str = "auto") -> None:
        self.history: deque[np.ndarray] = deque(maxlen=window)
        self.misses = dict.fromkeys(FORECASTS, 0)
        self._name = name

    @property
    def name(self) -> str:
        """The forecast in use."""
        return self._name if self._name != "auto" else min(FORECASTS, key=lambda name: self.misses[name])

    @property
    def hedge(self) -> int:
        """Thousandths of the expected loads to replace by their mean: the more, the more the forecast has missed."""
        return min(max(HEDGE, 100 + 1400 * self.misses[self.name] // 1_000_000), HIGHEST_HEDGE)

    def observe(self, loads: np.ndarray) -> None:
        """Takes in the loads int64 ``[N, E]`` of one micro-batch."""
        if self.history:
            for name in FORECASTS:
                now = miss(forecast(name, self.history), loads)
                self.misses[name] += (now - self.misses[name]) // 8
        self.history.append(loads)

    def expected(self) -> np.ndarray:
        """The loads to expect next, int64 ``[N, E]``; some must have been observed."""
        return forecast(self.name, self.history)
