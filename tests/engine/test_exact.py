"""Every strategy equals the unpatched model in fp32: loss, logits, every gradient."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering, thinned
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


EVERY_WAY = (1, 2, 3, 4), MAIN, STRATEGIES


@pytest.mark.parametrize(
    ("world_size", "family", "strategy"), thinned(list(itertools.product(*EVERY_WAY)), covering(*EVERY_WAY))
)
def test_equals_unpatched(ranks, world_size: int, family: str, strategy: str) -> None:
    check(ranks, world_size, family, strategy)


@pytest.mark.parametrize(
    ("family", "strategy"),
    thinned(
        list(itertools.product(GENERIC, STRATEGIES)),
        [(GENERIC[(at + more) % 3], one) for at, one in enumerate(STRATEGIES) for more in range(1 + at % 2)],
    ),
)
def test_generic_families(ranks, family: str, strategy: str) -> None:
    check(ranks, 3, family, strategy)
