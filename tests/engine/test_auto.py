"""``auto``, layers that run differently in one model, spilling weighed by a profile, and ``hf-laer tune``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_laer.cli.main import main
from hf_laer.profile import read_profile, shipped_profile
from tests.engine import cases_auto as cases


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_auto_equals_unpatched(ranks, world_size: int) -> None:
    family = ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe")[world_size - 1]
    chosen = ranks(world_size).run(cases.auto, family=family)
    assert all(rank == chosen[0] for rank in chosen)
    assert "auto" not in chosen[0]
    if world_size == 1:
        assert set(chosen[0]) == {"ep"}


MIXES = {
    "fsdp before fsep": (["fsdp", "fsep"], {}),
    "all": (["fsep+llep:sharded", "fsdp", "fsep+llep:whole", "fsep", "llep", "ep"], {}),
    "checkpointed": (["fsep", "fsdp", "llep"], {"checkpointing": True}),
}


@pytest.mark.parametrize("mix", MIXES)
def test_layers_that_run_differently(ranks, mix: str) -> None:
    strategies, settings = MIXES[mix]
    moved = ranks(3).run(cases.mixed, strategies=strategies, layers=max(4, len(strategies)), **settings)
    assert all(rank == moved[0] for rank in moved)
    assert moved[0]["moved"] > 0


def test_layers_that_run_differently_in_groups(ranks) -> None:
    moved = ranks(4).run(cases.mixed, strategies=["llep", "fsdp", "fsep"], layers=3, group_size=2)
    assert moved[0]["spilled"] > 0


def test_ranks_with_other_profiles_are_refused(ranks, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, flops in zip(paths, (1e12, 2e12), strict=True):
        dataclasses.replace(shipped_profile("cpu"), flops=flops).write(path)
    told = ranks(2).run(cases.profiles, paths=[str(path) for path in paths])
    assert all("rank 1 has another profile than rank 0" in message for message in told)
    assert ranks(2).run(cases.profiles, paths=[str(paths[0])]) == ["", ""]


def test_spilling_is_weighed_by_the_profile(ranks, tmp_path: Path) -> None:
    """A machine whose products are dear and whose links cost nothing spills; the other way round it does not."""
    path = tmp_path / "profile.json"
    cheap = {"intra_bandwidth": 1e15, "intra_latency": 0.0, "copy_bandwidth": 0.0}
    for change, spills in ((dict(cheap, flops=1e3), True), ({"flops": 1e18, "intra_bandwidth": 1.0}, False)):
        dataclasses.replace(shipped_profile("cpu"), **change).write(path)
        moved = ranks(2).run(cases.weighed, path=str(path))
        assert (moved[0]["spilled"] > 0) == spills
        assert moved[0] == moved[1]


SMALL = ["--experts", "6", "--hidden", "16", "--intermediate", "24", "--top-k", "2", "--tokens", "48", "--layers", "3"]


def test_tune(ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks measure, write one profile and recommend; one process recommends by it, for other clusters."""
    path, figures = tmp_path / "profile.json", tmp_path / "figures.json"
    few = ["--routing", "balanced,80:2", "--check", "llep,fsdp2", "--json", str(figures), "--seconds", "60"]
    assert ranks(2).run(cases.tune, arguments=[*SMALL, *few, "--out", str(path)]) == [0, 0]
    profile = read_profile(path)
    assert profile.device == "cpu"
    assert {"all_to_all", "broadcast", "copy", "products"} <= set(profile.measured)
    assert set(profile.assumed) == {"inter_per_rank", "inter_latency"}
    assert set(profile.host_seconds) == {"ep", "llep", "fsep", "fsep+llep", "fsdp", "fsdp2"}
    assert all(1e-5 < seconds < 30 for seconds in profile.host_seconds.values())
    assert max(profile.gemm_efficiency) == 1
    told = json.loads(figures.read_text())
    assert [(row["routing"], row["strategy"]) for row in told["checked"]] == [
        (routing, strategy) for routing in ("balanced", "80:2") for strategy in ("llep", "fsdp2")
    ]
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 for row in told["checked"])
    assert {row["strategy"] for row in told["predicted"]} == set(profile.host_seconds)
    assert not list(tmp_path.glob("*.tmp"))
    assert main(["tune", "--layer", "q128", "--profile", str(path), "--nodes", "2", "--ranks-per-node", "8"]) == 0
    shown = capsys.readouterr().out
    assert "2 x 8 ranks" in shown
    assert "recommended:" in shown


def test_tune_reads_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.models import tiny_model

    tiny_model("deepseek_v3", num_hidden_layers=3).save_pretrained(tmp_path / "model")
    shipped_profile("NVIDIA H200").write(tmp_path / "profile.json")
    arguments = ["--model", str(tmp_path / "model"), "--profile", str(tmp_path / "profile.json"), "--nodes", "1"]
    assert main(["tune", *arguments, "--ranks-per-node", "4"]) == 0
    assert "E 8 H 34 I 25 K 2, 2 layers" in " ".join(capsys.readouterr().out.split())


def test_tune_says_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 bytes of each of 48 x 128 x 3 x 2048 x 768 numbers: 432 GiB, for which 64 GiB of each 80 serve."""
    dataclasses.replace(shipped_profile("NVIDIA H200"), memory_bytes=80 * 2**30).write(tmp_path / "profile.json")
    arguments = ["tune", "--layer", "q128", "--layers", "48", "--profile", str(tmp_path / "profile.json")]
    for ranks, fits in (("4", False), ("8", True)):
        assert main([*arguments, "--ranks-per-node", ranks]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("do not fit 4 ranks: they take 7 at least" in shown) is not fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing: --experts, --hidden, --intermediate, --top-k"),
        (["--layer", "q128", "--tokens", "0"], "--tokens 0"),
        (["--layer", "q128", "--check", "us"], "--check us"),
        (["--layer", "q128", "--top-k", "500"], "top_k=500"),
        (["--layer", "q128", "--profile", "missing.json"], "missing.json"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
