"""LoRA on experts is unpatched PEFT's LoRA: gradients, training, files; and frozen experts send no gradients."""

from __future__ import annotations

import pytest

from tests.covering import covering, later, nightly, thinned
from tests.engine import cases_edges
from tests.integrations import cases_lora

STRATEGIES = ("ep", "llep", "fsep", "fsdp", "fsep+llep:whole")
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
MOVES = {"llep": "spilled", "fsep": "moved", "fsep+llep:whole": "replicas"}
RECOMPUTE = (None, "layer", "experts")
# Every strategy with every family and every kind of recompute, but not all three at once.
SOME = [
    (strategy, family, RECOMPUTE[(row + column) % 3])
    for row, strategy in enumerate(STRATEGIES)
    for column, family in enumerate(FAMILIES)
]


def check(counts, strategy: str, world_size: int) -> None:
    """All ranks count the same, and something moved where the strategy moves anything."""
    assert all(count == counts[0] for count in counts)
    if strategy in MOVES and world_size > 1:
        # Whole runs count what moved, replicas among it.
        assert counts[0].get(MOVES[strategy], counts[0]["moved"]) > 0, "nothing moved: the test proved nothing"


@pytest.mark.parametrize(("strategy", "family", "recompute"), thinned(SOME, SOME[::2]))
def test_gradients(ranks, strategy: str, family: str, recompute: str | None) -> None:
    counts = ranks(2).run(cases_lora.equal_gradients, family=family, strategy=strategy, recompute=recompute)
    check(counts, strategy, 2)


@pytest.mark.parametrize(("world_size", "strategy", "family"), [(1, "llep", "gpt_oss"), (4, "fsep", "qwen3_moe")])
def test_gradients_on_other_numbers_of_ranks(ranks, world_size: int, strategy: str, family: str) -> None:
    check(ranks(world_size).run(cases_lora.equal_gradients, family=family, strategy=strategy), strategy, world_size)


# On two ranks: above. On one and on four, each strategy meets each family and kind of recompute, and these each other.
@pytest.mark.long
@pytest.mark.parametrize(("strategy", "family", "recompute"), covering(STRATEGIES, FAMILIES, RECOMPUTE))
@pytest.mark.parametrize("world_size", [1, 4])
def test_gradients_on_one_and_four(ranks, world_size: int, strategy: str, family: str, recompute: str | None) -> None:
    counts = ranks(world_size).run(cases_lora.equal_gradients, family=family, strategy=strategy, recompute=recompute)
    check(counts, strategy, world_size)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_parameters": ["mlp.experts.down_proj"], "r": 9},
        {"target_modules": "all-linear", "target_parameters": None},
        {"target_modules": ["q_proj"], "target_parameters": None, "modules_to_save": ["experts"]},
        {"target_modules": ["q_proj", "v_proj"], "target_parameters": None},
    ],
    ids=["one stack", "all-linear", "experts in full", "attention only"],
)
def test_other_targets(ranks, settings) -> None:
    counts = ranks(2).run(cases_lora.equal_gradients, family="qwen3_moe", strategy="llep", settings=settings)
    check(counts, "llep", 2)


@pytest.mark.parametrize(
    ("strategy", "family", "checkpointing"), [("llep", "qwen3_moe", True), *later(("fsep", "gpt_oss", False))]
)
def test_trains(ranks, strategy: str, family: str, checkpointing: bool) -> None:
    counts = ranks(2).run(cases_lora.trains, family=family, strategy=strategy, checkpointing=checkpointing)
    check(counts, strategy, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "strategy", "family", "checkpointing"), covering([2, 4], STRATEGIES, FAMILIES, [False, True])
)
def test_trains_everywhere(ranks, world_size: int, strategy: str, family: str, checkpointing: bool) -> None:
    counts = ranks(world_size).run(cases_lora.trains, family=family, strategy=strategy, checkpointing=checkpointing)
    check(counts, strategy, world_size)


MESHES = {
    "replicas": {"parallelism": (2, 2), "slots_per_rank": 4},
    "groups": {"group_size": 2, "slots_per_rank": 4},
    "groups in replicas": {"parallelism": (2, 2), "group_size": 1, "slots_per_rank": 7},
}

# Every strategy on every kind of mesh, the families in turn.
PARTS = [
    (mesh, strategy, FAMILIES[(row + column + 2) % 3])
    for row, mesh in enumerate(MESHES)
    for column, strategy in enumerate(("fsep", "llep", "ep", "fsep+llep", "fsdp"))
]


@pytest.mark.parametrize(
    ("mesh", "strategy", "family"),
    # One of each kind of mesh.
    [*later(PARTS[0], PARTS[6], PARTS[12]), *nightly(*(way for at, way in enumerate(PARTS) if at not in (0, 6, 12)))],
)
def test_trains_on_parts_of_the_ranks(ranks, mesh: str, strategy: str, family: str) -> None:
    counts = ranks(4).run(cases_lora.trains, family=family, strategy=strategy, **MESHES[mesh])
    # Replicas and groups have loads of their own.
    assert {count["records"] for count in counts} == {2 * 2 * cases_lora.STEPS}
    if strategy in MOVES and mesh != "groups in replicas":
        assert max(count[MOVES[strategy]] for count in counts) > 0, "nothing moved: the test proved nothing"


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["llep", *nightly("ep", "fsep", "fsdp", "fsep+llep:whole")])
def test_bf16_gradients(ranks, strategy: str, family: str) -> None:
    arguments = {"family": family, "strategy": strategy, "steps": 12, "make": cases_lora.adapted_in}
    for name, (theirs, ours) in ranks(2).run(cases_edges.half_precision, **arguments)[0].items():
        assert ours <= 1.5 * theirs + 1e-3, f"{name}: {ours:.2e} against unpatched PEFT's {theirs:.2e}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "family", "mesh"),
    [
        ("llep", "qwen3_moe", "replicas"),
        ("fsep", "gpt_oss", None),
        *nightly(*(("llep", "qwen3_moe", mesh) for mesh in (None, "groups"))),
        *nightly(*(("fsep", "gpt_oss", mesh) for mesh in ("replicas", "groups"))),
    ],
)
def test_trains_in_bf16(ranks, strategy: str, family: str, mesh: str | None) -> None:
    settings = MESHES[mesh] if mesh else {}
    counts = ranks(4 if mesh else 2).run(cases_lora.trains_in_bf16, family=family, strategy=strategy, **settings)
    assert max(count[MOVES[strategy]] for count in counts) > 0, "nothing moved: the test proved nothing"


@pytest.mark.parametrize("strategy", ["llep", "fsep", *later("ep", "fsdp", "fsep+llep:whole")])
def test_frozen_experts_send_no_gradients(ranks, strategy: str) -> None:
    for made in ranks(2).run(cases_lora.frozen_and_trained, strategy=strategy):
        # Of two layers; the last one's forward has left its experts in the slots, if it sent for any.
        kept = {kind: forward - backward for kind, (forward, backward) in made.items() if kind != "all"}
        assert all(some in ((0, 1) if made[kind][0] == 1 else (made[kind][0] // 2,)) for kind, some in kept.items())
        forward, backward = made["all"]
        assert forward == (0 if strategy == "ep" else 2)
        assert backward == 2 * forward - forward // 2, "weights again, and their gradients"
