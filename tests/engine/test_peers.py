"""Experts that are read from peers' memory, and slots that serve twice: what was found by trying to break them."""

from __future__ import annotations

import pytest

from tests.engine import cases_peers

SMALL = {"mixtral": "intermediate_size", "gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}


@pytest.mark.parametrize(
    ("family", "strategy", "optimizer"),
    [
        ("gpt_oss", "fsep+llep:sharded", "SGD"),
        ("qwen3_moe", "fsep", "AdamW"),
        ("gpt_oss", "fsdp", "AdamW"),
    ],
)
def test_weights_of_a_run_with_peers_memory(ranks, family: str, strategy: str, optimizer: str) -> None:
    """Five rows over four ranks, the last of which owns none."""
    case = {"family": family, "strategy": strategy, "optimizer": optimizer, "steps": 10, SMALL[family]: 5}
    first, *others = ranks(4).run(cases_peers.trained, **case)
    assert all(other == first for other in others)
    assert first["sent"] == 0
    assert first["pulled"] > 0
    assert (first["empty"] > 0) == (family == "gpt_oss")


@pytest.mark.parametrize("strategy", ["fsep", "fsdp"])
def test_wider_than_the_arena(ranks, strategy: str) -> None:
    for found in ranks(2).run(cases_peers.wider, strategy=strategy):
        assert found["sent"] > 0
        assert found["pulled"] > 0


@pytest.mark.parametrize("peer_memory", [False, True])
def test_two_models_in_one_loss(ranks, peer_memory: bool) -> None:
    ranks(2).run(cases_peers.several, peer_memory=peer_memory)


WAYS = [("llep", False), ("fsep+llep:whole", False), ("fsep+llep:sharded", False), ("fsep+llep:sharded", True)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("strategy", "peer_memory"), WAYS)
def test_what_fails_midway(ranks, strategy: str, peer_memory: bool, checkpointing: bool) -> None:
    case = {"strategy": strategy, "peer_memory": peer_memory, "checkpointing": checkpointing}
    ranks(2).run(cases_peers.interrupted, **case)


@pytest.mark.parametrize(("strategy", "peer_memory"), [*WAYS, ("fsdp", True), ("fsep", False)])
def test_other_weights_between_forward_and_backward(ranks, strategy: str, peer_memory: bool) -> None:
    ranks(2).run(cases_peers.swapped, strategy=strategy, peer_memory=peer_memory)


def test_arenas_go_with_their_models(ranks) -> None:
    for most, left, engines in ranks(2).run(cases_peers.forgotten):
        assert most > 0
        assert (left, engines) == (0, 0)
