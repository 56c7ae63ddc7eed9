"""Fewer ways than all, and none of two values that meet is missing."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering


@pytest.mark.parametrize(
    ("factors", "most"),
    [((("a", "b"), (None, 1, 2)), 6), (((1, 2, 4), range(5), "xyz", (False, True)), 17), ((range(9), "ab", "cd"), 18)],
)
def test_every_two_values_meet(factors: tuple, most: int) -> None:
    ways = covering(*factors)
    assert ways == covering(*factors)
    assert len(ways) <= most
    assert set(ways) <= set(itertools.product(*factors))
    for one, other in itertools.combinations(range(len(factors)), 2):
        assert {(way[one], way[other]) for way in ways} == set(itertools.product(factors[one], factors[other]))
