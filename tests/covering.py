"""Some ways instead of all: where factors are many, faults sit in one value or in two that meet."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import pytest


def covering(*factors: Sequence[Hashable]) -> list[tuple[Any, ...]]:
    """Few of all combinations, in which every value of one factor meets every value of every other.

    Greedy, and the same each time: the combination that brings most pairs not met yet, the first one where several do.

    Args:
        factors: The values of each; at least two factors.

    Returns:
        Tuples with one value of each factor, in the order of ``itertools.product``.
    """
    ways = list(itertools.product(*(range(len(values)) for values in factors)))
    pairs = {way: set(itertools.combinations(enumerate(way), 2)) for way in ways}
    open_pairs = set().union(*pairs.values())
    chosen = []
    while open_pairs:
        best = max(ways, key=lambda way: len(pairs[way] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[best]
    return [tuple(values[at] for values, at in zip(factors, way, strict=True)) for way in sorted(chosen)]


def later(*values: Any) -> list[Any]:
    """Parameters (tuples of several) that only ``make test-long`` tries."""
    return _marked(values, pytest.mark.long)


def nightly(*values: Any) -> list[Any]:
    """Those that only ``make test-nightly`` tries."""
    return _marked(values, pytest.mark.nightly)


def _marked(values: Sequence[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark) for one in values]


def thinned(ways: Sequence[tuple[Any, ...]], now: Collection[tuple[Any, ...]]) -> list[Any]:
    """All of ``ways``; those that are not in ``now`` nightly."""
    assert set(now) <= set(ways), "no such way"
    return [pytest.param(*way, marks=[] if way in now else [pytest.mark.nightly]) for way in ways]
