"""Reports on saving, loading and resuming; the matrix of strategies, kinds of state and numbers of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.covering import covering, later, nightly
from tests.integrations import rig
from tests.integrations.test_merge import assert_same_weights, weights
from tests.pool import RankFailure
from tests.reports import cases_saving as cases

FULL, SHARDED = cases.KINDS
STRATEGIES = ("ep", "llep", "fsep", "fsdp")


@pytest.mark.parametrize("strategy", ["llep", "fsep"])
def test_b41_other_weights_after_a_re_layout(ranks, strategy: str) -> None:
    moved = ranks(2).run(cases.reloaded, strategy=strategy)
    assert moved[0] > 0


@pytest.mark.parametrize("kind", [FULL, *later(SHARDED)])
def test_b41_best_model_at_end(ranks, tmp_path: Path, kind: str) -> None:
    moved = ranks(2).run(cases.best_at_end, folder=str(tmp_path), strategy="fsep", kind=kind)
    assert moved[0] > 0


@pytest.mark.parametrize(("family", "strategy"), [("gpt_oss", "fsep"), *later(("qwen3_moe", "llep"))])
def test_b81_every_rank_s_experts_are_in_the_file(ranks, tmp_path: Path, family: str, strategy: str) -> None:
    replicas = (2, 2) if family == "gpt_oss" else None
    moved = ranks(4).run(
        cases.stamped_experts, folder=str(tmp_path), family=family, strategy=strategy, parallelism=replicas
    )
    assert moved[0] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{family}-{strategy}")
    experts = {name: value for name, value in model.named_parameters() if ".experts." in name}
    assert len(experts) == (8 if family == "gpt_oss" else 4), "two layers; gpt-oss has biases too"
    for name, value in experts.items():
        numbers = value.detach().flatten(1)
        assert numbers.min(1).values.tolist() == numbers.max(1).values.tolist() == [1, 2, 3, 4, 5, 6, 7], name


def test_b83_trainer_s_saves_end_and_are_whole(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(cases.files_by_rank, folder=str(tmp_path), seconds=60)
    model = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    state = {"optimizer.bin", "pytorch_model_fsdp.bin", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"}
    for name in ("checkpoint-2", "checkpoint-3"):
        assert set(first[name]) == model | tokenizer | state
        assert second.pop(name) == ["rng_state_1.pth"]
    assert set(first["final"]) == model | tokenizer
    assert not second, "another rank than the first wrote"


@pytest.mark.parametrize("strategy", [*later("llep"), *nightly("fsep")])
def test_b84_four_ranks_save_one_and_two_resume(ranks, tmp_path: Path, strategy: str) -> None:
    """Under other strategies, homes in other dimensions, and unpatched; loss, norm, weights, moments."""
    wanted = ranks(4).run(cases.saves, folder=str(tmp_path), strategy=strategy)[0]
    ways = [("fsep", SHARDED), (None, SHARDED)]
    ranks(1).run(cases.resumes, folder=str(tmp_path), ways=ways, wanted=wanted)
    ways = [("fsep", SHARDED), ("fsep", FULL), ("llep", FULL), ("fsep+llep:whole", SHARDED), (None, SHARDED)]
    ranks(2).run(cases.resumes, folder=str(tmp_path), ways=ways, wanted=wanted)


@pytest.mark.long
def test_b84_homes_of_the_union(ranks, tmp_path: Path) -> None:
    """On as many ranks, so that the engine's memory holds layouts of the same size: each kind resumes the other's."""
    kinds = ("fsep+llep:whole", "fsep+llep:sharded")
    for saver, other in (kinds, kinds[::-1]):
        folder = str(tmp_path / other)
        wanted = ranks(2).run(cases.saves, folder=folder, strategy=saver)[0]
        ranks(2).run(cases.resumes, folder=folder, ways=[(other, SHARDED), (saver, SHARDED)], wanted=wanted)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_b84_eight_ranks(ranks, tmp_path: Path) -> None:
    """More ranks than experts: one owns none. How many saved is seen in sharded states only; a full one is one file."""
    every = [("llep", SHARDED), ("fsep", FULL), ("fsep", SHARDED)]
    sharded, other = every[:1], every[2:]
    settings = {"strategy": "llep", "seconds": 200}
    try:
        wanted = {n: ranks(n).run(cases.saves, folder=str(tmp_path / str(n)), **settings)[0] for n in (1, 4, 8)}
        for savers, resumers, ways in ((1, 8, sharded), (4, 8, every), (8, 1, other), (8, 2, every)):
            folder, numbers = str(tmp_path / str(savers)), wanted[savers]
            ranks(resumers).run(cases.resumes, folder=folder, ways=ways, wanted=numbers, seconds=200)
    finally:
        ranks(8).stop()


@pytest.mark.long
@pytest.mark.parametrize("saver", ["fsep", *nightly("llep", None)])
def test_b84_to_and_from_replicas(ranks, tmp_path: Path, saver: str | None) -> None:
    """What two replicas of two shards (HSDP) saved, two ranks resume; and the other way."""
    replicas, one, two = {"parallelism": (2, 2)}, str(tmp_path / "one"), str(tmp_path / "two")
    wanted = ranks(4).run(cases.saves, folder=one, strategy=saver, **replicas)[0]
    ranks(2).run(cases.resumes, folder=one, ways=[(None, SHARDED), ("auto:llep,fsep", FULL)], wanted=wanted)
    wanted = ranks(2).run(cases.saves, folder=two, strategy=saver)[0]
    ways = [("fsep", FULL), ("fsep+llep", SHARDED)]
    ranks(4).run(cases.resumes, folder=two, ways=ways, wanted=wanted, **replicas)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_b86_adapters_of_every_rank(ranks, tmp_path: Path, kind: str) -> None:
    assert ranks(2).run(cases.adapters, folder=str(tmp_path), kind=kind) == [{1.0, 2.0}] * 2


def test_b88_files_are_those_of_the_unpatched_model(ranks, tmp_path: Path) -> None:
    families = ["mixtral", "gpt_oss", "deepseek_v3"]
    ranks(2).run(cases.pretrained, folder=str(tmp_path), families=families, strategy="fsep")
    for family in families:
        ours, plain = tmp_path / family / "ours", tmp_path / family / "plain"
        assert {path.name for path in ours.iterdir()} == {path.name for path in plain.iterdir()}
        assert len(list(ours.glob("*.safetensors"))) > 3
        assert_same_weights(ours, plain)
        for path in plain.glob("*.json"):
            written, expected = (json.loads((at / path.name).read_text()) for at in (ours, plain))
            if "index" in path.name:  # which file a tensor is in depends on what shares memory in the process
                written, expected = written["weight_map"].keys(), expected["weight_map"].keys()
            assert written == expected, path
        _, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert any(".experts.3." in name for name in weights(tmp_path / "mixtral" / "ours")), (
        "one tensor per expert on disk"
    )


def test_b89_only_the_first_rank_has_the_weights(ranks, tmp_path: Path) -> None:
    for how in ("plugin", "before", "after"):
        ranks(2).run(cases.loaded_on_first_rank, folder=str(tmp_path), how=how)


def test_auto_resumes_where_it_chooses_otherwise(ranks, tmp_path: Path) -> None:
    """Layers change homes both ways between save and load, and from several ranks to one."""
    wanted = ranks(2).run(cases.saves, folder=str(tmp_path), strategy="auto:fsep,llep")[0]
    ways = [("auto:llep,fsep", SHARDED), (None, FULL), ("auto:fsdp2,fsep", SHARDED), ("auto:fsdp2", FULL)]
    ranks(2).run(cases.resumes, folder=str(tmp_path), ways=ways, wanted=wanted)
    ranks(1).run(cases.resumes, folder=str(tmp_path), ways=[("auto:fsep", SHARDED)], wanted=wanted)


@pytest.mark.long
def test_what_auto_leaves_to_fsdp2_resumes_elsewhere(ranks, tmp_path: Path) -> None:
    wanted = ranks(2).run(cases.saves, folder=str(tmp_path), strategy="auto:fsdp2,llep")[0]
    ways = [("fsep", SHARDED), ("auto:llep,fsdp2", FULL), (None, SHARDED)]
    ranks(2).run(cases.resumes, folder=str(tmp_path), ways=ways, wanted=wanted)


# Of one kind by a profile, of several layer by layer.
AUTO = ("auto:llep", "auto:fsep+llep", "auto:fsdp,ep", "auto:ep,fsep", "auto:fsdp2,fsep+llep", "auto:fsdp2")


OTHERS = (None, "llep", "fsep")
# Who saves, who resumes, of which kind and on how many ranks: each meets each of the others' values.
AUTO_WAYS = covering(AUTO, (*AUTO, *OTHERS), cases.KINDS, (1, 2, 4)) + covering(OTHERS, AUTO, cases.KINDS, (1, 2, 4))


def check_ways(ranks, folder: str, saver: str | None, every: list[tuple[Any, ...]]) -> None:
    """What ``saver`` saves on two ranks is resumed in all its ways: (saver, resumer, kind, ranks)."""
    wanted = ranks(2).run(cases.saves, folder=folder, strategy=saver)[0]
    for world_size in (1, 2, 4):
        ways = [(other, kind) for one, other, kind, size in every if (one, size) == (saver, world_size)]
        ranks(world_size).run(cases.resumes, folder=folder, ways=ways, wanted=wanted, seconds=180)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("saver", [*nightly(*OTHERS), *AUTO[:2], *nightly(*AUTO[2:])])
def test_auto_matrix(ranks, tmp_path: Path, saver: str | None) -> None:
    """What each saves ``auto`` resumes; what ``auto`` saves, each, and ``auto`` that has chosen otherwise."""
    check_ways(ranks, str(tmp_path), saver, AUTO_WAYS)


@pytest.mark.long
def test_unpatched_checkpoint_under_strategies(ranks, tmp_path: Path) -> None:
    """What two unpatched ranks saved, two patched ones go on with."""
    wanted = ranks(2).run(cases.saves, folder=str(tmp_path), strategy=None)[0]
    ways = [("fsep", FULL), ("llep", SHARDED)]
    ranks(2).run(cases.resumes, folder=str(tmp_path), ways=ways, wanted=wanted)


WAYS = covering((None, *STRATEGIES), (None, "ep", "fsep"), cases.KINDS, (1, 2, 4))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("saver", [None, STRATEGIES[0], *nightly(*STRATEGIES[1:])])
def test_matrix(ranks, tmp_path: Path, saver: str | None) -> None:
    """Saved by each, resumed under homes of either dimension and unpatched, both kinds, on one, two and four ranks."""
    check_ways(ranks, str(tmp_path), saver, WAYS)


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, cases.Numbers]]:
    """Of a kind of state: the folder and the numbers of Trainer's four ranks under ``fsep``."""

    @cache
    def run(kind: str) -> tuple[Path, cases.Numbers]:
        folder = tmp_path_factory.mktemp("trained")
        arguments = {"folder": str(folder), "kind": kind, "strategy": "fsep", "resume": None}
        return folder, ranks(4).run(cases.trained_by_trainer, **arguments)[0]

    return run


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy"),
    [
        *later((SHARDED, 2, "llep"), (FULL, 4, "ep")),
        *nightly((FULL, 2, "llep"), (SHARDED, 1, None), (SHARDED, 4, "auto")),
    ],
)
def test_trainer_resumes_elsewhere(
    ranks, trained, tmp_path: Path, kind: str, world_size: int, strategy: str | None
) -> None:
    """Trainer's checkpoint of four ranks and ``fsep``, under other strategies on other numbers of ranks."""
    folder, whole = trained(kind)
    arguments = {"folder": str(tmp_path), "kind": kind, "strategy": strategy, "resume": f"{folder}/checkpoint-2"}
    ours = ranks(world_size).run(cases.trained_by_trainer, **arguments)[0]
    rig.assert_same(ours, whole)
    assert not np.allclose(whole["loss"][:2], whole["loss"][2:], rtol=1e-3)


@pytest.fixture(scope="module")
def uncut(ranks, tmp_path_factory: pytest.TempPathFactory) -> cases.Numbers:
    """The numbers of the run that is killed below, where nobody kills it; the kind of state changes none."""
    arguments = {"folder": str(tmp_path_factory.mktemp("uncut")), "kind": FULL, "strategy": "fsep", "resume": None}
    return ranks(2).run(cases.trained_by_trainer, **arguments, **cases.CUT)[0]


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (SHARDED, "model"),
        *later((SHARDED, "state"), (FULL, "optimizer")),
        *nightly((FULL, "model"), (SHARDED, "optimizer")),
    ],
)
def test_killed_save_leaves_the_earlier_checkpoint(ranks, uncut, tmp_path: Path, kind: str, moment: str) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks(2).run(cases.killed_while_saving, folder=str(tmp_path), kind=kind, moment=moment)
    ranks(2).run(cases.resumed_after_a_kill, folder=str(tmp_path), kind=kind, wanted=uncut)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (SHARDED, "optimizer"),
        *later((SHARDED, "rename"), (FULL, "model")),
        *nightly((SHARDED, "model"), (FULL, "optimizer")),
    ],
)
def test_killed_state_leaves_the_earlier_one(ranks, tmp_path: Path, kind: str, moment: str) -> None:
    """``save_state`` over an earlier state: that is there still, under its own name unless both were whole by then."""
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks(2).run(cases.state_killed_while_saving, folder=str(tmp_path), kind=kind, moment=moment)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == ({"state.old", "state.part"} if moment == "rename" else {"state", "state.part"})
    ranks(2).run(cases.resumed_after_a_killed_state, folder=str(tmp_path), kind=kind, name=min(found - {"state.part"}))


def test_saves_are_marked_and_written_aside(ranks, tmp_path: Path) -> None:
    ranks(2).run(cases.marks_and_parts, folder=str(tmp_path))
