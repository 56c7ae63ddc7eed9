"""The whole recipe as a user runs it, on a tiny model, and its checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sft
import upcycle

from hf_laer.config import STRATEGIES, LaerConfig
from hf_laer.profile import shipped_profile
from hf_laer.sim import load_trace
from tests.recipes import tiny
from tests.recipes.conftest import RECIPES

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    dense = tiny.checkpoint(folder / "dense")
    return upcycle.make_checkpoint(dense, folder / "moe", upcycle.UpcycleConfig(calibration_tokens=512))


def run(command: list[str]) -> str:
    """What the command writes; its last lines if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.timeout(480)
def test_two_processes_train_report_and_save(model: Path, tmp_path: Path) -> None:
    """As `make sft` runs it, on a machine on which moving so little pays."""
    free = replace(shipped_profile("cpu"), host_seconds={**dict.fromkeys(STRATEGIES, 0.0), "fsdp2": 1.0})
    replace(free, intra_latency=1e-9, intra_bandwidth=1e12).write(tmp_path / "profile.json")
    output = tmp_path / "out"
    command = [*LAUNCH, "--config_file", str(RECIPES / "accelerate" / "cpu_2processes.yaml"), str(RECIPES / "sft.py")]
    command += ["--config", str(RECIPES / "smollm2_moe.yaml"), "--output_dir", str(output)]
    command += ["--model_name_or_path", str(model), "--max_steps", "3", "--rows_per_domain", "16"]
    command += ["--trace", str(output / "trace.npz"), "--profile", str(tmp_path / "profile.json")]
    command += ["--require_moves", "true"]
    text = run(command)
    assert len(re.findall(r"layers\.\d +│ llep .* ms, fsep\+llep ", text)) == 3, text
    assert "Expert load, auto" in text
    assert re.search(r"step +3 +loss [\d.]+ .*tokens/s .*imbalance .*planned .*spilled .*moved", text)
    assert "best static" in text
    layers = json.loads((output / "expert_load.json").read_text())
    assert len(layers) == 3
    assert sum(layer["spilled"] for layer in layers) > 0
    assert all(layer["batches"] == 3 for layer in layers)
    trace = load_trace(output / "trace.npz")
    assert trace.loads.shape[:3] == (3, 3, 2)
    assert [layer["tokens"] for layer in layers] == trace.loads.sum((0, 2, 3)).tolist()
    # A gain that no static layout would have shown.
    planned, static = (sum(layer[name] for layer in layers) for name in ("after_mean", "static_mean"))
    assert planned < static
    assert (output / "expert_load.png").stat().st_size > 10_000
    assert not list(output.glob("*.tmp"))
    answered = run([sys.executable, str(RECIPES / "generate.py"), str(output / "final"), "--max_new_tokens", "4"])
    assert "hf_laer imported: False" in answered


@pytest.mark.long
def test_auto_leaves_a_model_to_fsdp2(model: Path, tmp_path: Path) -> None:
    """By a profile under which our own layers cost the host a second each; the report says what became of them."""
    host = {**dict.fromkeys(STRATEGIES, 1.0), "fsdp2": 0.0}
    replace(shipped_profile("cpu"), host_seconds=host).write(tmp_path / "profile.json")
    output = tmp_path / "out"
    command = [*LAUNCH, "--config_file", str(RECIPES / "accelerate" / "cpu_2processes.yaml"), str(RECIPES / "sft.py")]
    command += ["--config", str(RECIPES / "smollm2_moe.yaml"), "--output_dir", str(output), "--strategy", "auto"]
    command += ["--model_name_or_path", str(model), "--max_steps", "2", "--rows_per_domain", "16"]
    command += ["--profile", str(tmp_path / "profile.json")]
    text = run(command)
    assert len(re.findall(r"layers\.\d +│ fsdp2 .* ms, ep 1600", text)) == 3, text
    assert "auto left every MoE layer to FSDP2" in text
    assert (output / "final" / "model.safetensors").exists()
    assert "imbalance" not in text.split("Expert load")[0]


@pytest.mark.parametrize("required", [False, True])
def test_a_demonstration_is_of_ours(required: bool) -> None:
    """What has to move is recorded, and ``auto`` leaves to FSDP2 no layer that is recorded."""
    laer = SimpleNamespace(to_config=lambda: LaerConfig(strategy="auto"))
    recipe = SimpleNamespace(trace=None, require_moves=required)
    callback = sft.make_callback(SimpleNamespace(laer=laer, recipe=recipe))
    assert callback is not None
    assert callback.recorded == required


def test_gpt_oss_is_loaded_dequantized(monkeypatch) -> None:
    monkeypatch.setattr(sft, "get_quantization_config", lambda _model: None)
    model = SimpleNamespace(model_revision="main", dtype="bfloat16", attn_implementation=None)
    settings = SimpleNamespace(model=model, recipe=SimpleNamespace(dequantize=True))
    assert sft.model_options(settings)["quantization_config"].dequantize
    settings.recipe.dequantize = False
    assert sft.model_options(settings) == {"revision": "main", "dtype": "bfloat16"}


def test_each_setting_of_upcycling_has_its_own_checkpoint() -> None:
    one, other = upcycle.UpcycleConfig(), upcycle.UpcycleConfig(noise=0.01)
    assert sft.fingerprint(one) == sft.fingerprint(upcycle.UpcycleConfig())
    assert sft.fingerprint(one) != sft.fingerprint(other)


def test_a_model_is_made_once_and_looked_for_by_all(model: Path, tmp_path: Path, monkeypatch) -> None:
    settings = SimpleNamespace(
        model=SimpleNamespace(model_name_or_path=None), upcycle=upcycle.UpcycleConfig(calibration_tokens=512)
    )
    state = SimpleNamespace(is_main_process=True, process_index=0, wait_for_everyone=lambda: None)
    monkeypatch.setattr(upcycle, "bundled_checkpoint", lambda: model.parent / "dense")
    made = sft.model_path(settings, tmp_path, state)
    monkeypatch.setattr(sft, "make_checkpoint", pytest.fail)
    assert sft.model_path(settings, tmp_path, state) == made
    other = SimpleNamespace(is_main_process=False, process_index=1, wait_for_everyone=lambda: None)
    with pytest.raises(FileNotFoundError, match="a disk that all nodes share"):
        sft.model_path(settings, tmp_path / "elsewhere", other)
    settings.model.model_name_or_path = "some/model"
    assert sft.model_path(settings, tmp_path, state) == "some/model"
