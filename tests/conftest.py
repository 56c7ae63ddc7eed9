"""Shared fixtures: pools of rank processes that live as long as the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hf_laer.plan import compile_kernels
from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)`` is the pool of n processes; ``ranks(n).run(case, **kwargs)`` calls a function on each."""
    # Once here, so that the ranks load what is compiled instead of all compiling it at once.
    compile_kernels()
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, fresh=world_size == 3))

    yield pool
    for made in pools.values():
        made.stop()
