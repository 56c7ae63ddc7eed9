"""Tokens through memory that the ranks of one host share: exact, by whatever way they come, and when it is used."""

from __future__ import annotations

import pytest

from tests.engine import cases_peer_tokens

EVERY = [
    (2, "mixtral", "ep", {}),
    (3, "qwen2_moe", "llep", {}),
    (4, "gpt_oss", "llep", {}),
    (2, "qwen3_moe", "fsep+llep:whole", {}),
    (3, "gpt_oss", "fsep+llep:sharded", {}),
    (4, "qwen3_moe", "fsep", {}),
]
LONG = [
    (4, "mixtral", "ep", {"checkpointing": True}),
    (3, "mixtral", "llep", {"checkpointing": True, "recompute": "experts"}),
    (2, "gpt_oss", "fsep", {"checkpointing": True}),
    (2, "qwen3_moe", "llep", {"max_rows_per_rank": 7}),
]


@pytest.mark.parametrize(
    ("world", "family", "strategy", "config"),
    [*EVERY, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_equals_unpatched(ranks, world: int, family: str, strategy: str, config: dict) -> None:
    for found in ranks(world).run(cases_peer_tokens.equal, family=family, strategy=strategy, **config):
        assert found["put"] > 0
        assert found["rows"] > 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("strategy", "settings"), [("ep", {}), ("llep", {"imbalance_threshold": 1.7})])
def test_tokens_set_out_ahead(ranks, world: int, strategy: str, settings: dict) -> None:
    """Where nothing is spilled; what set out for a plan that spills after all, or had no room, is sent for again."""
    for found in ranks(world).run(cases_peer_tokens.routed, strategy=strategy, routings="sshshsss", **settings):
        # Not in the first step, nor where a rank has more tokens than there is room for; twice where it spills.
        assert 0 < found["rows"] < 8
        assert found["rows"] + (strategy == "llep") <= found["all"]


def test_several_kinds_of_exchange(ranks) -> None:
    ranks(3).run(cases_peer_tokens.exchanges, steps=12)


def test_what_is_put_ahead_is_what_is_sent(ranks) -> None:
    found = ranks(3).run(cases_peer_tokens.ahead, experts=7, top_k=2)
    assert found == [[True, True, True, False]] * 3


def test_room_grows_with_the_tokens(ranks) -> None:
    first, *others = ranks(2).run(cases_peer_tokens.room_grows)
    assert [tuple(room[:3]) for room in first] == [(8, 2, 16), (8, 2, 16), (11, 2, 16), (11, 3, 16)]
    assert others == [first]


@pytest.mark.parametrize("allocated", [True, False])
def test_memory_that_one_rank_cannot_share(ranks, allocated: bool) -> None:
    for found in ranks(2).run(cases_peer_tokens.refused, allocated=allocated):
        assert "put" not in found
        assert found["made"] == 1


def test_memory_is_refused_between_forward_and_backward(ranks) -> None:
    assert ranks(2).run(cases_peer_tokens.no_more_room) == [[True, True, False, False, False]] * 2


def test_inference_mode_comes_first(ranks) -> None:
    ranks(2).run(cases_peer_tokens.after_inference)


@pytest.mark.parametrize(
    ("strategy", "config", "shared"),
    [
        ("llep", {"peer_memory": True}, True),
        ("llep", {}, False),
        ("llep", {"peer_memory": True, "group_size": 1}, False),
        ("llep", {"peer_memory": True, "check_collectives": True}, False),
        ("llep", {"peer_memory": True, "ranks_per_node": 1}, False),
    ],
)
def test_when_memory_is_shared(ranks, strategy: str, config: dict, shared: bool) -> None:
    assert ranks(2).run(cases_peer_tokens.with_engine, strategy=strategy, **config) == [shared] * 2
