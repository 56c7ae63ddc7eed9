"""Every strategy equals the unpatched model in fp32: loss, logits, every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine import cases

STRATEGIES = ("ep", "llep", "fsep", "fsep+llep:sharded", "fsep+llep:whole", "fsdp")
MAIN = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
GENERIC = ("olmoe", "qwen3_next", "deepseek_v3")
MOVES = {
    "llep": ["spilled"],
    "fsep": ["moved"],
    "fsep+llep:sharded": ["spilled"],
    "fsep+llep:whole": ["spilled", "replicas"],
}


def check(ranks, world_size: int, family: str, strategy: str, **config) -> None:
    moved = ranks(world_size).run(
        cases.equal_to_unpatched, family=family, config={"strategy": strategy, "history": 1, **config}
    )
    assert all(rank == moved[0] for rank in moved)
    assert moved[0]["records"] > 0
    for what in MOVES.get(strategy, []) if world_size > 1 else ():
        assert moved[0][what] > 0, "nothing moved: the test proved nothing"


def every_way() -> Iterator[Any]:
    """Ranks, families and strategies; some of the ends in the long tests."""
    for world_size, family, strategy in itertools.product((1, 2, 3, 4), MAIN, STRATEGIES):
        end = world_size in (1, 4) and (strategy in ("ep", "fsdp") or family in ("mixtral", "qwen2_moe"))
        yield pytest.param(world_size, family, strategy, marks=[pytest.mark.long] if end else [])


@pytest.mark.parametrize(("world_size", "family", "strategy"), list(every_way()))
def test_equals_unpatched(ranks, world_size: int, family: str, strategy: str) -> None:
    check(ranks, world_size, family, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", GENERIC)
def test_generic_families(ranks, family: str, strategy: str) -> None:
    check(ranks, 3, family, strategy)
