"""What rank processes run for ``auto``, and for layers that run differently in one model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from hf_laer import LaerConfig, patch_model
from hf_laer.choice import Choice, LayerSizes, choose
from hf_laer.cli.main import main
from hf_laer.config import FSDP2, STRATEGIES
from hf_laer.integrations.transformers import get_engine
from hf_laer.profile import shipped_profile
from tests.engine import cases
from tests.models import settings_of, tiny_model

# What was last chosen for, inside `choosing` of several.
ASKED: list[LayerSizes] = []


def tune(arguments: list[str]) -> int:
    """The command on every rank of a pool."""
    return main(["tune", *arguments])


def auto(family: str, **config: Any) -> list[str]:
    """``auto`` equals the unpatched model.

    Returns:
        Each layer's strategy.
    """
    cases.equal_to_unpatched(family, {"strategy": "auto", **config})
    model = cases.patched(tiny_model(family), strategy="auto", **config)
    engine = get_engine(model)
    assert engine is not None
    found = [layer.config.strategy for layer in engine.layers.values()]
    assert found == [choice.strategy for choice in engine.choices.values()]
    return found


def mixed(strategies: list[str], layers: int, checkpointing: bool = False, **config: Any) -> dict[str, Any]:
    """A model whose layers take ``strategies`` in turn equals the unpatched one.

    Returns:
        What moved.
    """
    settings = {"strategy": "auto", "history": 1, **config}
    slots = -(-7 // (config.get("group_size") or dist.get_world_size()))
    with choosing(strategies):
        return cases.equal_to_unpatched(
            "qwen3_moe",
            {**settings, "slots_per_rank": slots},
            prepare=(lambda model: model.gradient_checkpointing_enable()) if checkpointing else None,
            changes={"num_hidden_layers": layers},
            steps=4,
        )


@contextmanager
def choosing(strategies: Sequence[str]) -> Iterator[None]:
    """Inside, ``auto`` chooses one strategy by a profile under which no other pays, or several, layer by layer.

    ``fsdp2`` is among them only where there is an FSDP2 to leave layers to.
    """
    if len(strategies) == 1:
        host = {one: float(one not in strategies) for one in (*STRATEGIES, FSDP2)}
        profile = dataclasses.replace(shipped_profile("cpu"), host_seconds=host)
        with mock.patch("hf_laer.engine.shipped_profile", return_value=profile):
            yield
        return
    with mock.patch("hf_laer.engine.choose", _in_turn(strategies)):
        yield


def _in_turn(strategies: Sequence[str]) -> Any:
    def chosen(config: LaerConfig, layers: Any, *arguments: Any, **keywords: Any) -> dict[str, Choice]:
        ASKED[:] = layers.values()
        settled = choose(config, layers, *arguments, **keywords)
        turns = zip(settled, itertools.cycle(strategies), strict=False)
        # Homes that are not named are whole.
        full = {one: f"{one}:whole" if one == "fsep+llep" else one for one in strategies if one != FSDP2}
        configs = {one: dataclasses.replace(config, **settings_of(named)) for one, named in full.items()}
        return {name: Choice(strategy, configs.get(strategy), "in turn") for name, strategy in turns}

    return chosen


def profiles(paths: list[str]) -> str:
    """Each rank reads its own profile."""
    config = LaerConfig(strategy="llep", profile=paths[dist.get_rank() % len(paths)])
    # The same path on all ranks, as on nodes with disks of their own.
    model = tiny_model("mixtral")
    patch_model(model, config)
    engine = get_engine(model)
    assert engine is not None
    engine.config = dataclasses.replace(config, profile="/profile.json")
    try:
        engine.attach(engine.detach(), cases.world_mesh())
    except ValueError as error:
        return str(error)
    return ""


def weighed(path: str | None) -> dict[str, int]:
    """``llep`` without a threshold: what is spilled under a profile, still equal to the unpatched model."""
    config = {"strategy": "llep", "profile": path, "imbalance_threshold": None, "min_tokens_per_gemm": 1}
    return cases.equal_to_unpatched("qwen3_moe", config, steps=2)
