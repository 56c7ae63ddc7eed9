"""Every shipped configuration is understood, and a wrong setting is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import arguments
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, PartialState

from hf_laer import LaerConfig
from tests.recipes.conftest import RECIPES

MODELS = sorted(RECIPES.glob("*.yaml"))
LAUNCHES = sorted((RECIPES / "accelerate").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _forget_state() -> Iterator[None]:
    """Training arguments make Accelerate's process-wide state; the next test starts without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_shipped_recipes_are_understood(file: Path, tmp_path: Path) -> None:
    settings = arguments.parse(["--config", str(file), "--output_dir", str(tmp_path)])
    assert settings.laer.to_config() is not None
    assert settings.laer.strategy == "auto"
    assert settings.training.output_dir == str(tmp_path)
    assert settings.training.gradient_checkpointing
    assert settings.recipe.dequantize == ("gpt-oss" in str(settings.model.model_name_or_path))


@pytest.mark.parametrize("file", LAUNCHES, ids=lambda file: file.stem)
def test_shipped_launches_use_fsdp2(file: Path) -> None:
    config = load_config_from_file(str(file))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert not config.use_cpu
    assert config.num_processes % config.num_machines == 0


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = str(RECIPES / "smollm2_moe.yaml")
    told = ["--config", file, "--output_dir", str(tmp_path), "--strategy", "fsep", "--slots_per_rank", "3"]
    config = arguments.parse(told).laer.to_config()
    assert config is not None
    assert (config.strategy, config.slots_per_rank) == ("fsep", 3)


def test_strategy_none_is_the_unpatched_model() -> None:
    assert arguments.LaerArguments(strategy="none").to_config() is None


def test_every_setting_of_laer_config_can_be_told() -> None:
    own = {field.name for field in dataclasses.fields(LaerConfig)}
    assert {field.name for field in dataclasses.fields(arguments.LaerArguments)} == own
    assert arguments.LaerArguments().to_config() == LaerConfig()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("strategy", "best"), ("capacity_factor", 0.5), ("recompute", "all"), ("history", 0)],
)
def test_wrong_settings_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{setting}={value!r}"):
        arguments.LaerArguments(**{setting: value})


def test_without_a_gpu_training_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(arguments.torch.cuda, "is_available", lambda: False)
    assert arguments.cpu_options([]) == ["--use_cpu", "true", "--bf16", "false"]
    assert arguments.cpu_options(["--bf16", "true"]) == ["--use_cpu", "true"]
    monkeypatch.setattr(arguments.torch.cuda, "is_available", lambda: True)
    assert arguments.cpu_options([]) == []
