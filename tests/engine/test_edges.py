"""The edges of the engine: each case equals the unpatched model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.covering import covering, later, nightly, thinned
from tests.engine import cases_edges

PLAIN, PLANNED = ("ep", "fsdp"), ("llep", "fsep", "fsep+llep:sharded")
WHOLE = "fsep+llep:whole"
STRATEGIES = (*PLAIN, *PLANNED)
HALF = ("mixtral", "gpt_oss")
STEPPED = ("llep", "fsep"), ("sgd", "adamw"), ("before", "after")


@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 0, 0], [0, 0, 4]], ids=str)
@pytest.mark.parametrize("routing", ["random", "one expert", "last rank"])
@pytest.mark.parametrize("strategy", [*nightly(*PLAIN, WHOLE), *PLANNED])
def test_routings_and_ranks_without_tokens(ranks, strategy: str, routing: str, counts: list[int]) -> None:
    ranks(3).run(cases_edges.routed, family="qwen3_moe", strategy=strategy, counts=counts, routing=routing, config={})


@pytest.mark.parametrize("slots", [4, 5, 7])
def test_slots_per_rank(ranks, slots: int) -> None:
    config = {"slots_per_rank": slots}
    moved = ranks(2).run(
        cases_edges.routed, family="qwen3_moe", strategy="fsep", counts=[30, 11], routing="random", config=config
    )
    # With seven slots each rank holds all seven experts.
    assert (moved[0]["moved"] > 0) == (slots < 7)


@pytest.mark.parametrize(
    ("world", "family", "config"),
    [
        (2, "gpt_oss", {}),
        (3, "qwen3_moe", {"max_rows_per_rank": 5}),
        (4, "mixtral", {"ranks_per_node": 2, "check_collectives": True}),
    ],
    ids=["two", "chunks", "nodes"],
)
def test_spilled_to_where_tokens_come_from(ranks, world: int, family: str, config: dict[str, Any]) -> None:
    found = ranks(world).run(cases_edges.at_home, family=family, **config)
    assert all(one == found[0] for one in found)
    assert found[0]["spilled"] > 0
    assert found[0]["at home"] > 0, "LLEP's own plans"


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep"])
def test_token_groups(ranks, strategy: str, group_size: int) -> None:
    ranks(4).run(cases_edges.grouped, family="mixtral", strategy=strategy, group_size=group_size)


@pytest.mark.parametrize("strategy", ["llep", "fsep", *later("ep", "fsep+llep:sharded", "fsdp"), WHOLE])
def test_hsdp_mesh(ranks, strategy: str) -> None:
    ranks(4).run(cases_edges.replicated, family="gpt_oss", strategy=strategy)


@pytest.mark.parametrize("strategy", ["llep", "fsep"])
@pytest.mark.parametrize(
    "names",
    [
        ("experts.gate_up_proj", "experts.down_proj"),
        ("experts.down_proj",),
        ("embed_tokens.weight", "proj.weight", "norm.weight", "layernorm.weight", "gate.weight", "head.weight"),
    ],
    ids=["experts", "one", "all but experts"],
)
def test_frozen_parts(ranks, strategy: str, names: tuple[str, ...]) -> None:
    ranks(2).run(cases_edges.frozen, family="mixtral", strategy=strategy, frozen_names=names)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "made"),
    thinned(list(itertools.product(*STEPPED)), covering(*STEPPED)),
)
def test_optimizer_steps(ranks, strategy: str, optimizer: str, made: str) -> None:
    ranks(2).run(cases_edges.stepped, family="qwen2_moe", strategy=strategy, optimizer=optimizer, made=made)


@pytest.mark.parametrize("strategy", ["llep", "fsep+llep"])
def test_large_groups_alone(ranks, strategy: str) -> None:
    for calls in ranks(2).run(cases_edges.large_groups_alone, strategy=strategy):
        assert calls["alone"] > 0
        assert calls["together"] > 0
        assert calls["both"] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generation(ranks, strategy: str) -> None:
    ranks(2).run(cases_edges.generated, family="qwen3_moe", strategy=strategy)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_auxiliary_loss(ranks, family: str) -> None:
    ranks(2).run(cases_edges.auxiliary, family=family, strategy="llep")


@pytest.mark.parametrize(
    ("strategy", "family"),
    thinned(list(itertools.product(STRATEGIES, HALF)), [(one, HALF[at % 2]) for at, one in enumerate(STRATEGIES)]),
)
def test_bfloat16_error(ranks, strategy: str, family: str) -> None:
    for name, (theirs, ours) in ranks(2).run(cases_edges.half_precision, family=family, strategy=strategy)[0].items():
        assert ours <= 1.5 * theirs + 1e-3, f"{name}: {ours:.2e} against the unpatched model's {theirs:.2e}"


def test_where_the_mean_is_taken(ranks) -> None:
    """On the routing weights, unless numbers are of 16 bits with a narrow exponent or the ranks are no power of two."""
    half = [("float16", None), ("float16", "float32"), ("bfloat16", "float16"), (None, "float16")]
    told = {"dtypes": [(None, None), ("bfloat16", "bfloat16"), *half]}
    assert ranks(2).run(cases_edges.shares, **told) == [[0.5, 0.5, 1, 1, 1, 1]] * 2
    assert ranks(3).run(cases_edges.shares, **told) == [[1] * 6] * 3


def test_model_stays_itself(ranks) -> None:
    ranks(4).run(cases_edges.mesh_and_state)
