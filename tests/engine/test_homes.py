"""``fsep+llep`` with experts that live whole with an owner: replicas ahead of need, exact split, spill."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import cases_homes as cases

WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two ranks": (2, 6, {"optimizer": "AdamW"}),
    "uneven owners": (3, 7, {"checkpointing": "experts"}),
    "two nodes, a rank owns nothing": (4, 5, {"checkpointing": "layer", "optimizer": "AdamW", "ranks_per_node": 2}),
    "checked": (3, 7, {"check_collectives": True}),
    "not ahead": (2, 6, {"prefetch": False}),
}


@pytest.mark.parametrize("way", [pytest.param(one, marks=[pytest.mark.long] * (one in ("checked",))) for one in WAYS])
def test_drifting_loads(ranks, way: str) -> None:
    world_size, experts, settings = WAYS[way]
    (first, *others) = ranks(world_size).run(cases.drifting, experts=experts, **settings)
    assert all(other["steps"] == first["steps"] for other in others)
    assert any(one["passed"] > 0 for one in (first, *others)) == ("ranks_per_node" in settings)
    start, _, settled, turned, again = first["steps"]
    assert first["unused"]
    assert start["spilled"] > 0, "nothing is known yet: LLEP"
    assert settled["replicas"] > 0
    assert settled["spilled"] < start["spilled"], "foreseen"
    assert turned["spilled"] > settled["spilled"], "not foreseen"
    assert again["replicas"] > 0
    assert again["spilled"] < turned["spilled"]
    if settings.get("prefetch", True):
        assert settled["ahead"] > 0
        assert turned["late"] > settled["late"]
    else:
        assert all(step["ahead"] == 0 for step in first["steps"])


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_replicas_that_a_plan_does_without(ranks, checkpointing: bool) -> None:
    """What is on its way and not wanted is waited for and dropped, by every rank alike."""
    (first, other) = ranks(2).run(cases.refused, checkpointing=checkpointing)
    assert first == other
    assert all(ahead > 0 for ahead, _ in first[1:])
    assert all(refused > 0 for _, refused in first[1:]), first


def test_nothing_travels_where_nothing_is_won(ranks) -> None:
    assert ranks(3).run(cases.even, experts=6, strategy="fsep+llep:whole") == [(0, 0)] * 3


def test_where_experts_are_put(ranks) -> None:
    assert ranks(2).run(cases.homes_of, strategy="fsep+llep:whole") == [[("whole", 0)]] * 2
    assert ranks(2).run(cases.homes_of, strategy="fsep+llep:sharded") == [[("sharded", 1)]] * 2
    settled = ranks(2).run(cases.homes_of, strategy="fsep+llep")
    assert settled[0] == settled[1]
    assert settled[0] in ([("whole", 0)], [("sharded", 1)])
    assert ranks(2).run(cases.homes_of, strategy="fsep+llep", group_size=1) == [[("sharded", 1)]] * 2


def test_an_offloaded_home_stays_on_the_host(ranks) -> None:
    assert ranks(2).run(cases.elsewhere) == [True, True]
