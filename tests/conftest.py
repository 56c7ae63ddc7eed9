"""Shared fixtures: pools of rank processes that live as long as the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)`` is the pool of n processes; ``ranks(n).run(case, **kwargs)`` calls a function on each."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for made in pools.values():
        made.stop()
