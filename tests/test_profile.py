"""Profiles of machines: written whole, read with every field checked, the same figures after."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_laer.cli.main import main
from hf_laer.plan import topology
from hf_laer.profile import HOST_SECONDS, Profile, fit_line, read_machine, read_profile, shipped_profile


def measured() -> Profile:
    shipped = shipped_profile("NVIDIA H200")
    points = {"all_to_all": ((65536.0, 2e-5), (262144.0, 2.5e-5))}
    return dataclasses.replace(shipped, flops=5e14, memory_bytes=2**37, assumed=("inter_per_rank",), measured=points)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "profile.json"
    measured().write(path)
    assert read_profile(path) == measured()
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_hash_of_what_predictions_use() -> None:
    one = measured()
    assert one.digest() == dataclasses.replace(one, measured={}, assumed=()).digest()
    for name in ("flops", "copy_bandwidth", "intra_latency", "inter_per_rank"):
        assert dataclasses.replace(one, **{name: 2 * getattr(one, name)}).digest() != one.digest()


def test_a_cluster_of_such_machines(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measured().write(path)
    machine = read_machine(path, nodes=3, ranks_per_node=8)
    assert (machine.num_ranks, machine.nodes, machine.flops) == (24, 3, 5e14)
    assert machine.inter_bandwidth == topology("h200", 3, 8).inter_bandwidth
    path.write_text('{"num_ranks": 4, "ranks_per_node": 4, "flops": 1e12}')
    assert read_machine(path, 2, 2).nodes == 2


def test_simulate_takes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--drift", "8e-top2", "--steps", "6", "--layers", "1", "--warmup", "2", "--planner", "ep"]
    argv += ["--nodes", "1", "--json", str(tmp_path / "out.json"), "--profile"]
    seconds = []
    for flops in (5e14, 5e13):
        dataclasses.replace(measured(), flops=flops).write(tmp_path / "profile.json")
        assert main([*argv, str(tmp_path / "profile.json")]) == 0
        seconds.append(json.loads((tmp_path / "out.json").read_text())["ep"]["compute_ms"])
    assert seconds[1] > 3 * seconds[0]


WRONG = [
    ("device", 7, "device"),
    ("device", "x" * 300, "device"),
    ("flops", "fast", "flops"),
    ("flops", 0, "flops"),
    ("flops", True, "flops"),
    ("flops", float("nan"), "flops"),
    ("flops", 10**400, "flops"),
    ("gemm_tokens", 5, "gemm_tokens"),
    ("gemm_tokens", [], "gemm_tokens"),
    ("gemm_tokens", [1.5] * 7, "gemm_tokens"),
    ("gemm_tokens", [64, 32], "gemm_tokens"),
    ("gemm_efficiency", [2.0] * 7, "gemm_efficiency"),
    ("gemm_efficiency", [[0.1]] * 7, "gemm_efficiency"),
    ("copy_bandwidth", -1, "copy_bandwidth"),
    ("intra_bandwidth", None, "intra_bandwidth"),
    ("intra_latency", float("inf"), "intra_latency"),
    ("inter_per_rank", 0, "inter_per_rank"),
    ("inter_per_rank", "1", "inter_per_rank"),
    ("inter_latency", -1e-6, "inter_latency"),
    ("host_seconds", [1], "host_seconds"),
    ("host_seconds", {"eplb": 1}, "host_seconds.*eplb"),
    ("host_seconds", {"ep": -1}, "host_seconds of ep"),
    ("host_seconds", {"ep": {}}, "host_seconds of ep"),
    ("memory_bytes", 1.5, "memory_bytes"),
    ("memory_bytes", -1, "memory_bytes"),
    ("assumed", "flops", "assumed"),
    ("assumed", [["flops"]], "assumed"),
    ("measured", [], "measured"),
    ("measured", {"copy": 5}, "measured.copy"),
    ("measured", {"copy": [[1, 2, 3]]}, "measured.copy"),
    ("measured", {"copy": [[1, "x"]]}, "measured.copy"),
    ("speed", 1, "unknown fields speed"),
    ("format", "hf_laer profile 99", "format"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_fields_are_named_with_the_file(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**measured().to_dict(), field: value}))
    with pytest.raises(ValueError, match=rf"(?s)profile\.json.*{message}"):
        read_profile(path)


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Profile)])
def test_missing_fields(tmp_path: Path, field: str) -> None:
    path = tmp_path / "profile.json"
    values = measured().to_dict()
    del values[field]
    path.write_text(json.dumps(values))
    if field in ("spill_seconds", "memory_bytes", "assumed", "measured"):
        assert read_profile(path).flops == measured().flops
    else:
        with pytest.raises(ValueError, match=rf"profile\.json.*lacks {field}"):
            read_profile(path)


def test_a_profile_from_before_fsdp2_was_measured(tmp_path: Path) -> None:
    values = measured().to_dict()
    del values["host_seconds"]["fsdp2"]
    values["host_seconds"]["llep"] = 3e-3
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    shipped = HOST_SECONDS["fsdp2"] / min(HOST_SECONDS[name] for name in HOST_SECONDS if name != "fsdp2")
    assert read_profile(path).host("fsdp2") == pytest.approx(shipped * 3e-3)
    assert measured().host("fsdp2") == HOST_SECONDS["fsdp2"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{" * 100_000,
        b'{"format": 1',
        b"9" * 5000,
        b" " * (2**20 + 1),
        b"\x80\x04K\x01.",
    ],
    ids=["empty", "list", "null", "binary", "deep", "cut", "digits", "large", "pickle"],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"profile\.json is not a profile"):
        read_profile(path)
    with pytest.raises(ValueError, match=r"profile\.json is not a topology"):
        read_machine(path, 1, 1)


def test_every_cut_of_a_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole = json.dumps(measured().to_dict()).encode()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"profile\.json"):
            read_profile(path)


def test_latency_and_bandwidth_from_times() -> None:
    points = [(size, 3e-5 + size / 2e11) for size in (2.0**14, 2.0**18, 2.0**22, 2.0**28)]
    latency, bandwidth = fit_line(points)
    assert latency == pytest.approx(3e-5, rel=1e-6)
    assert bandwidth == pytest.approx(2e11, rel=1e-6)
    assert fit_line([(100.0, 2.0)]) == (0.0, 50.0)
    latency, bandwidth = fit_line([(100.0, 1.0), (200.0, 3.0)])  # no line with a latency of at least 0
    assert latency == 0
    assert 66 < bandwidth < 100
    for bad in ([], [(0.0, 1.0)], [(1.0, 0.0)]):
        with pytest.raises(ValueError, match="positive"):
            fit_line(bad)


def test_shipped_profiles() -> None:
    assert shipped_profile("NVIDIA H100 80GB HBM3").flops == 740e12
    assert shipped_profile("NVIDIA A100-SXM4-80GB").flops == shipped_profile("Something New").flops
    assert shipped_profile("cpu").flops < 1e12
    for device in ("NVIDIA H200", "Something New", "cpu"):
        assert Profile.from_dict(shipped_profile(device).to_dict()) == shipped_profile(device)
        assert set(shipped_profile(device).assumed) >= {"flops", "intra_bandwidth", "host_seconds"}
