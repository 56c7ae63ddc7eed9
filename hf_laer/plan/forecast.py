"""The next micro-batch's loads from recent ones, in whole tokens: every rank forecasts the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ._jit import kernel

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
    return _weighted(_weights(name, len(history)), np.array(history, np.int64))


@kernel
def _weighted(weights: np.ndarray, history: np.ndarray) -> np.ndarray:
    """The mean of ``history`` int64 ``[L, N, E]``, rounded down, at least 0; weights may be negative."""
    found, total = np.zeros(history.shape[1:], np.int64), weights.sum()
    for at in range(len(weights)):
        if weights[at] != 0:
            found += weights[at] * history[at]
    flat = found.reshape(-1)
    for at in range(len(flat)):
        flat[at] = max(flat[at] // total, 0)
    return found


@lru_cache(maxsize=256)
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
    return _miss(np.ascontiguousarray(expected, np.int64), np.ascontiguousarray(loads, np.int64))


@kernel
def _miss(expected: np.ndarray, loads: np.ndarray) -> int:
    off, totals = 0, (max(expected.sum(), 1), max(loads.sum(), 1))
    for expert in range(loads.shape[1]):
        shares = expected[:, expert].sum() * 1_000_000 // totals[0], loads[:, expert].sum() * 1_000_000 // totals[1]
        off += abs(shares[0] - shares[1])
    return off // 2


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
            history = np.array(self.history, np.int64)
            for name in FORECASTS:
                now = miss(_weighted(_weights(name, len(history)), history), loads)
                self.misses[name] += (now - self.misses[name]) // 8
        self.history.append(loads)

    def expected(self) -> np.ndarray:
        """The loads to expect next, int64 ``[N, E]``; some must have been observed."""
        return forecast(self.name, self.history)
