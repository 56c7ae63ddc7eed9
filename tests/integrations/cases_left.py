"""What rank processes run for layers that ``auto`` leaves to FSDP2. Each case asserts for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from hf_laer import expert_parameters, is_patched, patch_model, record_trace, unpatch_model
from hf_laer.engine import Engine
from hf_laer.integrations.accelerate import LaerFSDPPlugin, hook
from hf_laer.integrations.accelerate.resume import save_state
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from tests.engine.cases_auto import ASKED, choosing
from tests.integrations import cases, rig, rig_trl
from tests.models import assert_close, gradients, tiny_model

LAER = ("check_collectives", "prefetch", "slots_per_rank")
WRAPPED = "_checkpoint_wrapped_module."


def prepared(strategies: list[str], family: str = "qwen3_moe", layers: int = 3, **settings: Any) -> rig.Loop:
    """A loop whose layers run as ``strategies``, in turn."""
    laer = {key: settings.pop(key) for key in LAER if key in settings}
    plugin = settings.pop("plugin", {})
    made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="auto", **laer), **plugin)
    with choosing(strategies):
        return rig.Loop(family, made, sizes={"num_hidden_layers": layers}, **settings)


def unpatched(_: str, family: str, layers: int, steps: int, **settings: Any) -> dict[str, Any]:
    """The same loop without us: gradients of the first batch, then steps; weights and the optimizer's state after."""
    run = rig.Loop(family, rig.fsdp_plugin(), sizes={"num_hidden_layers": layers}, **settings)
    return numbers(run, steps)


def numbers(run: rig.Loop, steps: int) -> dict[str, Any]:
    """See :func:`unpatched`."""
    ids = run.batch(0)
    run.accelerator.backward(run.model(input_ids=ids, labels=ids, use_cache=False).loss)
    first = {name.replace(WRAPPED, ""): grad for name, grad in gradients(run.model).items()}
    run.optimizer.zero_grad()
    found = run.train(steps)
    state = run.accelerator.get_state_dict(run.model)
    return {**found, "gradients": first, "moments": moments(run), "names": list(state), "state": state}


def moments(run: rig.Loop) -> dict[str, np.ndarray]:
    """AdamW's state of every parameter, in full."""
    return {
        f"{name.replace(WRAPPED, '')}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .numpy()
        .copy()
        for name, parameter in run.model.named_parameters()
        for key, value in run.optimizer.state[parameter].items()
    }


def equal(
    strategies: list[str],
    family: str = "qwen3_moe",
    layers: int = 3,
    steps: int = 4,
    tolerance: float = 1e-5,
    **settings: Any,
) -> cases.Counts:
    """Every gradient, AdamW steps, AdamW's state, the checkpoint's names and values: the unpatched model's.

    Args:
        strategies: The layers', in turn.
        family: The model's.
        layers: Its decoder layers.
        steps: AdamW's.
        tolerance: Of weights and moments after these steps; gradients that nearly cancel grow apart in them.
        settings: Of :func:`prepared`.
    """
    plain = {key: value for key, value in settings.items() if key not in ("plugin", *LAER)}
    theirs = rig.reference(unpatched, "", family, layers, steps, **plain)
    with rig.fresh_accelerate():
        run = prepared(strategies, family, layers, **settings)
        ours = numbers(run, steps)
        engine = get_engine(run.model)
    assert engine is not None
    moe = len(engine.choices)
    wanted = [strategies[at % len(strategies)] for at in range(moe)]
    assert [choice.strategy for choice in engine.choices.values()] == wanted
    assert len(engine.layers) == moe - wanted.count("fsdp2")
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, grad in theirs["gradients"].items():
        assert_close(ours["gradients"][name], grad, name)
    rig.assert_same(ours, theirs, tolerance)
    rig.assert_same({"weights": ours["moments"]}, {"weights": theirs["moments"]}, tolerance)
    assert ours["names"] == theirs["names"]
    for name, value in theirs["state"].items():
        assert_close(ours["state"][name], value, name, tolerance)
    return cases.counted(engine.recorder.drain())


def whole_model(folder: str) -> None:
    """With every layer left, the engine does nothing, and what asks it says so."""
    with rig.fresh_accelerate():
        run = prepared(["fsdp2"], check_collectives=True)
        model, engine = run.model, get_engine(run.model)
        assert engine is not None
        assert is_patched(model)
        assert not engine.layers
        assert engine.is_sharded
        assert expert_parameters(model) == set()
        assert all(choice.config is None for choice in engine.choices.values())
        assert model.model.layers[0].mlp.experts.config._experts_implementation == "eager"
        assert patch_model(model, engine.config) is model
        with pytest.raises(ValueError, match="auto has left every MoE layer to FSDP2"):
            record_trace(model, f"{folder}/trace.npz")
        run.train(2)
        assert engine._announced == 4, "ranks still compare each forward"
        assert not engine.recorder.drain()
        save_state(run.accelerator, f"{folder}/state")
        assert json.loads(Path(folder, "state", "laer_state.json").read_text()) == {}
        run.accelerator.load_state(f"{folder}/state")
        assert unpatch_model(model) is model
        assert not is_patched(model)
        run.train(1)
    dist.barrier()


def mixed_model(folder: str) -> None:
    """One layer is left: a trace is of the others, and sharded experts are not put back."""
    with rig.fresh_accelerate():
        run = prepared(["llep", "fsdp2", "fsep"])
        model, engine = run.model, get_engine(run.model)
        assert engine is not None
        names = list(engine.choices)
        assert list(engine.layers) == [names[0], names[2]]
        assert len(expert_parameters(model)) == 4
        with record_trace(model, f"{folder}/trace.npz") as trace:
            run.train(1)
        assert trace.steps == (2 if dist.get_rank() == 0 else 0)
        with pytest.raises(RuntimeError, match="sharded over ranks and cannot be put back"):
            unpatch_model(model)
        left = model.get_submodule(names[1])
        assert all(isinstance(parameter, DTensor) for parameter in left.parameters())
        assert all(parameter.placements[0].dim == 0 for parameter in left.parameters())


def failed_sharding() -> None:
    """Where FSDP2 fails, nothing is left behind, and a second try runs as the first would have."""
    with rig.fresh_accelerate():
        model = tiny_model("qwen3_moe", num_hidden_layers=3)
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="auto"))
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        left: list[Any] = []
        settle = Engine.settle

        def settles(*args: Any, **kwargs: Any) -> Any:
            left.extend(settle(*args, **kwargs))
            return left

        def fails(*_: Any) -> None:
            assert len(left) == 2
            assert not any(layer.homes for layer in left), "whole parameters are kept while FSDP2 shards"
            raise RuntimeError("broken")

        broken = mock.patch.object(hook, "_sharded", fails)
        seen = mock.patch.object(Engine, "settle", settles)
        with choosing(["fsdp2", "llep"]), seen, broken, pytest.raises(RuntimeError, match="broken"):
            rig.Loop("qwen3_moe", made, model=model)
        engine = get_engine(model)
        assert engine is not None
        assert len(engine.layers) == 3
        assert all(layer.module.config._experts_implementation == "hf_laer" for layer in engine.layers.values())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    with rig.fresh_accelerate(), choosing(["fsdp2", "llep"]):
        run = rig.Loop("qwen3_moe", made, model=model)
        assert {one.reduce_bytes for one in ASKED} == {0}, "frozen"
        assert [choice.strategy for choice in engine.choices.values()] == ["fsdp2", "llep", "fsdp2"]
        run.train(1)


def kept(how: str) -> list[str]:
    """Where FSDP2 could not do what was asked for, no layer is left to it."""
    laer: dict[str, Any] = {"max_rows_per_rank": 64} if how == "max_rows_per_rank" else {}
    plugin: dict[str, Any] = {"no_wrap": {"auto_wrap_policy": "no_wrap"}, "kept": {"reshard_after_forward": False}}
    model = tiny_model("qwen3_moe")
    if how == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]))
    with rig.fresh_accelerate(), choosing(["fsdp2"]):
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="auto", **laer), **plugin.get(how, {}))
        if how == "recorded":
            patch_model(model, made.laer)
            record_trace(model, "trace.npz")
        run = rig.Loop("qwen3_moe", made, model=model)
        run.train(1)
    engine = get_engine(run.model)
    assert engine is not None
    return [layer.config.strategy for layer in engine.layers.values()]


def trains(folder: str, strategies: list[str], **settings: Any) -> list[tuple[str, str]]:
    """TRL SFT, checkpointed activations too: loss, gradient norm and weights are the unpatched run's.

    Returns:
        The callback's choices: strategy and reason.
    """
    plain = {key: value for key, value in settings.items() if "checkpointing" not in key}
    sizes = {"num_hidden_layers": 3}
    theirs = rig.reference(rig_trl.run_sft, folder, "qwen3_moe", sizes=sizes, **plain)
    callback = LaerCallback(rig.eager(strategy="auto"))
    with rig.fresh_accelerate(), choosing(strategies):
        ours = rig_trl.run_sft(folder, "qwen3_moe", [callback], sizes=sizes, **settings)
    rig.assert_same(ours, theirs)
    if len(strategies) > 1:
        wanted = "layer" if settings.get("gradient_checkpointing") else "none"
        assert [(one.recompute, one.looped, one.reduce_bytes) for one in ASKED] == [(wanted, True, 4)] * 3
    run = {record.layer for record in callback.records}
    assert run == {name for name, choice in callback.choices.items() if choice.config is not None}
    assert all(("laer/spilled" in log) == bool(run) for log in ours["logs"])
    assert callback.state()["attributes"]["memory"].keys() == run
    return [(choice.strategy, choice.reason) for choice in callback.choices.values()]


def traced(folder: str, how: str) -> list[str]:
    """A trace needs all layers: with one, or where the callback is told so, ``auto`` leaves none."""
    callback = LaerCallback(rig.eager(strategy="auto"), trace=f"{folder}/trace.npz" if how == "trace" else None)
    callback.recorded |= how == "recorded"
    with rig.fresh_accelerate(), choosing(["fsdp2"]):
        rig_trl.run_sft(folder, "qwen3_moe", [callback], max_steps=1)
    return [choice.strategy for choice in callback.choices.values()]


def resumed(folder: str, before: list[str], after: list[str], kind: str) -> None:
    """A run goes on from another one's state, whose layers ran otherwise: the same weights as without us."""
    plugin = {"state_dict_type": kind}
    theirs = rig.reference(unpatched, "", "qwen3_moe", 3, 4)
    with rig.fresh_accelerate():
        first = prepared(before, plugin=plugin)
        first.train(2)
        save_state(first.accelerator, f"{folder}/state")
    with rig.fresh_accelerate():
        second = prepared(after, plugin=plugin)
        second.accelerator.load_state(f"{folder}/state")
        second.micro = first.micro
        ours = second.train(2)
    rig.assert_same({"weights": ours["weights"]}, {"weights": theirs["weights"]})
    dist.barrier()
