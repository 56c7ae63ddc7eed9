"""``auto`` may leave layers to FSDP2: these are the unpatched model's, and the others are ours."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.covering import nightly
from tests.integrations import cases_left as cases


@pytest.mark.parametrize("strategies", [["llep", "fsdp2", "fsep"], ["fsdp2"]], ids=["mixed", "all"])
def test_left_layers_equal_unpatched(ranks, strategies: list[str]) -> None:
    moved = ranks(2).run(cases.equal, strategies=strategies)[0]
    assert (moved["records"] > 0) == (moved["moved"] > 0) == (len(strategies) > 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "world_size"),
    [("deepseek_v3", 3), ("gpt_oss", 4), *nightly(("mixtral", 3), ("gpt_oss", 3), ("qwen2_moe", 3))],
)
def test_left_layers_of_families(ranks, family: str, world_size: int) -> None:
    settings = {"parallelism": (2, 2), "slots_per_rank": 4} if world_size == 4 else {}
    for strategies in (["fsdp2", "fsep+llep:whole"], ["fsdp2"], ["ep", "fsdp2"], ["fsdp", "fsdp2"]):
        ranks(world_size).run(cases.equal, strategies=strategies, family=family, steps=2, tolerance=1e-4, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"prefetch": False}, {"check_collectives": True}, {"plugin": {"activation_checkpointing": True}}]
)
def test_left_layers_under_settings(ranks, changes: dict) -> None:
    for strategies in (["fsdp2", "llep"], ["fsep", "fsdp2"], ["fsdp2"]):
        ranks(2).run(cases.equal, strategies=strategies, steps=2, **changes)


def test_a_model_that_is_left_whole(ranks, tmp_path: Path) -> None:
    ranks(2).run(cases.whole_model, folder=str(tmp_path))


def test_a_model_of_both_kinds(ranks, tmp_path: Path) -> None:
    ranks(2).run(cases.mixed_model, folder=str(tmp_path))


def test_sharding_that_fails_leaves_no_layer(ranks) -> None:
    ranks(2).run(cases.failed_sharding)


@pytest.mark.parametrize("how", ["max_rows_per_rank", "no_wrap", "kept", "lora", "recorded"])
def test_what_fsdp2_could_not_do_is_kept(ranks, how: str) -> None:
    assert ranks(2).run(cases.kept, how=how) == [["llep", "llep"]] * 2


@pytest.mark.long
def test_trl(ranks, tmp_path: Path) -> None:
    mixed = ["llep", "fsdp2", "llep"]
    found = ranks(2).run(cases.trains, folder=str(tmp_path), strategies=mixed, gradient_checkpointing=True, max_steps=4)
    assert found == [[(one, "in turn") for one in mixed]] * 2
    found = ranks(2).run(cases.trains, folder=str(tmp_path), strategies=["fsdp2"], max_steps=4)
    assert [strategy for strategy, _ in found[0]] == ["fsdp2"] * 3
    assert all(" ms, " in reason for _, reason in found[0])
    for how in ("trace", "recorded"):
        assert ranks(2).run(cases.traced, folder=str(tmp_path), how=how) == [["llep", "llep"]] * 2


RUNS = (["llep", "fsdp2", "fsep"], ["fsdp2", "fsep+llep:whole", "llep"], ["fsdp2"], ["fsep+llep:sharded", "fsep", "ep"])


def test_goes_on_from_another_choice(ranks, tmp_path: Path) -> None:
    settings = {"before": RUNS[0], "after": RUNS[1], "kind": "SHARDED_STATE_DICT"}
    ranks(2).run(cases.resumed, folder=str(tmp_path), **settings)


@pytest.mark.long
@pytest.mark.parametrize("kind", [*nightly("FULL_STATE_DICT"), "SHARDED_STATE_DICT"])
def test_goes_on_from_other_choices(ranks, tmp_path: Path, kind: str) -> None:
    for before, after in [*itertools.pairwise(RUNS), (RUNS[-1], RUNS[0])]:
        ranks(2).run(cases.resumed, folder=str(tmp_path), before=before, after=after, kind=kind)
