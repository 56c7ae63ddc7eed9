"""Experts that travel ahead of need: the right ones, used once, on every rank alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hf_laer.passes import Passes
from tests.covering import later, thinned
from tests.engine import cases_ahead

# Strategies whose experts may be read from peers' memory.
CUT = ("fsep+llep:sharded", "fsdp")


def test_order_is_learnt_from_the_pass_before() -> None:
    passes = Passes()
    for layer in "abc":
        passes.enter(layer)
    assert [passes.after(layer) for layer in "abc"] == ["b", "c", None]
    passes.end()
    passes.enter("a")
    assert passes.number == 2
    assert passes.is_first()
    assert passes.after("a") == "b"
    assert passes.after("c") is None
    passes.enter("c")
    assert passes.after("a") == "c", "the latest order counts"


def test_a_layer_seen_before_begins_a_pass() -> None:
    passes = Passes()
    for layer in "abab":
        passes.enter(layer)
    assert passes.number == 2


@pytest.mark.parametrize("checkpointing", [False, *later(True)])
@pytest.mark.parametrize(
    ("strategy", "peer_memory"),
    [(one, False) for one in ("llep", "fsep", "fsep+llep:sharded", "fsdp")] + [(one, True) for one in CUT],
)
def test_travels_once_and_ahead(ranks, strategy: str, peer_memory: bool, checkpointing: bool) -> None:
    """How often weights set out in a step, and how much of it before their layer began."""
    settings = {"strategy": strategy, "peer_memory": peer_memory, "checkpointing": checkpointing}
    (first, *others) = ranks(3).run(cases_ahead.counted, **settings)
    assert all(other == first for other in others)
    layers = first["layers"]
    # Once for the forward and once for the backward; a checkpointed layer's recompute leaves them in the slots, and so
    # does the last layer's forward.
    assert first["whole"] == 2 * layers - 1
    # In backward all but the last layer; in forward all, where the need is known ahead.
    assert first["ahead"] == layers - 1 + (0 if strategy == "llep" else layers)
    assert (first["spilled"] > 0) == ("llep" in strategy)


@pytest.mark.parametrize("checkpointing", [*later(False), True])
@pytest.mark.parametrize(
    ("strategy", "peer_memory"),
    [("llep", False), ("fsep+llep:whole", False), ("fsep", False), ("fsep+llep:sharded", True), ("fsdp", True)],
)
def test_stays_until_backward(ranks, strategy: str, peer_memory: bool, checkpointing: bool) -> None:
    """Weights set out once in a step, before their layer where the need is known; nothing does in backward."""
    settings = {"strategy": strategy, "peer_memory": peer_memory, "checkpointing": checkpointing}
    (first, *others) = ranks(3).run(cases_ahead.counted, reshard_after_forward=False, **settings)
    assert all(other == first for other in others)
    assert first["whole"] == first["layers"]
    assert first["ahead"] == (0 if strategy == "llep" else first["layers"])


WAYS: dict[str, dict[str, Any]] = {
    "messages": {"homes": "sharded"},
    "memory": {"homes": "sharded", "peer_memory": True},
    "whole": {"homes": "whole"},
    "memory, kept": {"homes": "sharded", "peer_memory": True, "reshard_after_forward": False},
    "whole, kept": {"homes": "whole", "reshard_after_forward": False},
}
EVENTS = tuple(cases_ahead.EVENTS)
# Each event by two of the ways, each way with four of the events.
SOME = [(how, tuple(WAYS)[(at + 2 * more) % 5]) for at, how in enumerate(EVENTS) for more in range(2)]


@pytest.mark.parametrize(("how", "way"), thinned(list(itertools.product(EVENTS, WAYS)), SOME))
def test_what_was_not_foreseen(ranks, how: str, way: str) -> None:
    ranks(2).run(cases_ahead.unforeseen, how=how, **WAYS[way])


def test_without_prefetch(ranks) -> None:
    counted = ranks(3).run(cases_ahead.counted, strategy="fsep+llep:sharded", checkpointing=False, prefetch=False)[0]
    assert counted["ahead"] == 0


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep+llep:whole"])
def test_own_experts_are_converted_while_the_host_plans(ranks, strategy: str) -> None:
    """Once for the forward, before the plan is known, and once for the backward."""
    settings = {"slots_per_rank": 5} if strategy == "fsep+llep:whole" else {}
    want = [["converted", "planned", "converted"]] * 3
    assert ranks(2).run(cases_ahead.converted, strategy=strategy, **settings) == [want] * 2
    settings["reshard_after_forward"] = False
    want = [["converted", "planned"]] * 3
    assert ranks(2).run(cases_ahead.converted, strategy=strategy, **settings) == [want] * 2


def test_experts_that_are_cut_are_not(ranks) -> None:
    found = ranks(2).run(cases_ahead.converted, strategy="fsep", slots_per_rank=4)
    assert found == [[["planned"]] * 3] * 2


@pytest.mark.parametrize("strategy", ["llep", "fsep+llep:whole"])
def test_copies_stay_for_a_backward_only(ranks, strategy: str) -> None:
    settings = {"slots_per_rank": 5} if strategy == "fsep+llep:whole" else {}
    assert ranks(2).run(cases_ahead.copies_that_stay, strategy=strategy, **settings) == [[0, 0, 3, 0]] * 2
