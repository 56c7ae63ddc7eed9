"""How often a layer's host waits: once where every token goes to its expert's owner, whatever the strategy could do."""

from __future__ import annotations

import pytest

from tests.engine import cases_waits

# Spread routing is not level over 2 or 3 ranks with 7 experts; below this ratio nothing is spilled.
LEVEL_ENOUGH = 1.7


@pytest.mark.parametrize("world", [2, 3])
def test_ep_waits_once(ranks, world: int) -> None:
    found = ranks(world).run(cases_waits.waits, strategy="ep", routings="shh1s")
    assert found == [[1, 1, 1, 1, 1]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_spilling_waits_again(ranks, world: int) -> None:
    """Twice where it spills, and in the step after: it expects the same until it has seen otherwise."""
    settings = {"strategy": "llep", "imbalance_threshold": LEVEL_ENOUGH}
    found = ranks(world).run(cases_waits.waits, routings="sshhsshs", **settings)
    assert found == [[1, 1, 2, 2, 2, 1, 2, 2]] * world


def test_groups_and_checks(ranks) -> None:
    """Four ranks in two token groups, one of which may spill alone; every collective is compared."""
    settings = {"strategy": "llep", "imbalance_threshold": LEVEL_ENOUGH, "group_size": 2, "check_collectives": True}
    found = ranks(4).run(cases_waits.waits, routings="sshs", **settings)
    assert found == [[1, 1, 2, 2]] * 4


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep"])
def test_once_whatever_the_plan_where_memory_is_shared(ranks, strategy: str) -> None:
    """Three times more where room is made: for who is willing, who has memory, and who has mapped it."""
    settings = {"strategy": strategy, "peer_memory": True}
    for found in ranks(2).run(cases_waits.waits, routings="hhs1hshh", **settings):
        assert set(found) == {1, 4}
        assert found.count(4) < 4


def test_laid_out_anew_waits_twice(ranks) -> None:
    """Where rows go depends on a layout that no rank knows before the loads."""
    found = ranks(2).run(cases_waits.waits, strategy="fsep", routings="sh")
    assert found == [[2, 2]] * 2
