"""What rank processes run for the tests of Accelerate's side. Each case asserts for itself, and returns
counts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_laer import patch_model
from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.transformers.validate import check_processes, check_state
from hf_laer.telemetry.record import LayerRecord
from tests.engine.cases import world_mesh
from tests.integrations import rig
from tests.models import repeatable, tiny_model

Counts = dict[str, int]


def counted(records: Any) -> Counts:
    """How many records, spilled tokens and moved replicas."""
    records = list(records)
    return {
        "records": len(records),
        "spilled": sum(record.spilled for record in records),
        "moved": sum(record.moved for record in records),
    }


def assert_same_records(ours: list[LayerRecord], theirs: list[LayerRecord]) -> None:
    """All but the time that planning took."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.layer, mine.step) == (other.layer, other.step)
        np.testing.assert_array_equal(mine.loads_after, other.loads_after)
        assert (mine.moved, mine.spilled) == (other.moved, other.spilled)


def loop(family: str, strategy: str, plugin: dict[str, Any] | None = None, steps: int = 10, **settings: Any) -> Counts:
    """AdamW steps of a plain Accelerate loop, patched and not: the same."""
    theirs = rig.reference(rig.run_loop, "", family, plugin, steps, **settings)
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy), **plugin or {})
        run = rig.Loop(family, made, **settings)
        ours = run.train(steps)
        engine = get_engine(run.model)
    rig.assert_same(ours, theirs)
    assert engine is not None
    assert engine.unsharder.keeps == (not made.reshard_after_forward)
    return counted(engine.recorder.drain())


def checkpointed_by_accelerate(strategy: str, steps: int, **settings: Any) -> Counts:
    """Accelerate's own activation checkpointing changes nothing."""
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, steps)
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(
            LaerFSDPPlugin, laer=rig.eager(strategy=strategy, **settings), activation_checkpointing=True
        )
        run = rig.Loop("qwen3_moe", made)
        ours = run.train(steps)
        engine = get_engine(run.model)
        first, second = (unit for unit in run.model.modules() if type(unit).__name__ == "FSDPQwen3MoeDecoderLayer")
        assert first._get_fsdp_state()._states_to_forward_prefetch == [second._get_fsdp_state()]
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain())


def forward_cut_short(strategy: str, steps: int) -> Counts:
    """Forwards that end after the first layer, between backward and step, leave nothing behind."""
    theirs = rig.reference(unpatched_cut_short, "", steps)
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy))
        ours, engine = run_cut_short(made, steps)
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain())


def unpatched_cut_short(_: str, steps: int) -> dict[str, Any]:
    """The numbers of the unpatched model."""
    return run_cut_short(rig.fsdp_plugin(), steps)[0]


def run_cut_short(plugin: Any, steps: int) -> tuple[dict[str, Any], Any]:
    """A loop that runs the model's first layer alone before each step; its numbers, and the engine if it has one."""
    run = rig.Loop("qwen3_moe", plugin)
    config, step = run.model.config, run.optimizer.step
    layers = config.num_hidden_layers

    def cut_short() -> None:
        config.num_hidden_layers = 1
        run.model.eval()
        with torch.no_grad():
            run.model(input_ids=run.batch(0), use_cache=False)
        run.model.train()
        config.num_hidden_layers = layers
        step()

    run.optimizer.step = cut_short
    return run.train(steps), get_engine(run.model)


def saved_and_loaded(folder: str, strategy: str, kind: str) -> Counts:
    """Three steps, ``save_state``, a fresh process's ``load_state``, three more: the same as six in one go.

    Placements too go on as they were: every record of the second half is the same.
    """
    plugin = {"state_dict_type": kind, "laer": rig.eager(strategy=strategy, history=3)}
    with rig.fresh_accelerate(), repeatable():
        whole = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, **plugin))
        whole.train(3)
        whole.accelerator.save_state(folder)
        _records(whole)
        theirs = whole.train(3)
        expected = _records(whole)
    with rig.fresh_accelerate(), repeatable():
        second = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, **plugin))
        second.accelerator.load_state(folder)
        second.micro = 6
        ours = second.train(3)
        found = _records(second)
    rig.assert_same(ours, {**theirs, **{key: theirs[key][3:] for key in ("loss", "grad_norm")}})
    assert_same_records(found, expected)
    return counted(expected)


def baseline_checkpoint(folder: str, strategy: str, kind: str) -> Counts:
    """A checkpoint of unpatched FSDP2 resumes under a patched model, optimizer included."""
    with rig.fresh_accelerate():
        plain = rig.Loop("qwen3_moe", rig.fsdp_plugin(state_dict_type=kind))
        plain.train(3)
        plain.accelerator.save_state(folder)
        theirs = plain.train(3)
    with rig.fresh_accelerate():
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, state_dict_type=kind, laer=rig.eager(strategy=strategy))
        second = rig.Loop("qwen3_moe", plugin)
        second.accelerator.load_state(folder)
        second.micro = 6
        ours = second.train(3)
    rig.assert_same(ours, {**theirs, **{key: theirs[key][3:] for key in ("loss", "grad_norm")}})
    return counted(_records(second))


def pretrained_round_trip(folder: str, strategy: str) -> None:
    """``get_state_dict`` and ``save_pretrained`` give the keys and bytes that the unpatched model's would."""
    with rig.fresh_accelerate():
        plain = tiny_model("qwen3_moe")
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy)))
        run.train(0)
        state = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            assert state.keys() == before.keys()
            for name, value in state.items():
                assert torch.equal(value, before[name]), name
            run.model.save_pretrained(f"{folder}/laer", state_dict=state)
            plain.save_pretrained(f"{folder}/plain")
            ours, theirs = (load_file(f"{folder}/{kind}/model.safetensors") for kind in ("laer", "plain"))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        dist.barrier()


def _records(run: rig.Loop) -> list[LayerRecord]:
    engine = get_engine(run.model)
    assert engine is not None
    return engine.recorder.drain()


def loaded_on_one_rank(folder: str, strategy: str, steps: int) -> Counts:
    """RAM-efficient loading: only rank 0 has the weights before ``prepare``, all have their shards after."""
    with rig.fresh_accelerate():
        if dist.get_rank() == 0:
            tiny_model("qwen3_moe").save_pretrained(folder)
        dist.barrier()
        theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, steps)
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy), cpu_ram_efficient_loading=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
        run = rig.Loop("qwen3_moe", plugin, model=model)
        assert accelerator.state is not None
        ours = run.train(steps)
    rig.assert_same(ours, theirs)
    return counted(_records(run))


def in_bf16(strategy: str, steps: int) -> Counts:
    """bf16 compute over fp32 masters: dtypes are FSDP2's, losses near the unpatched bf16 run's."""
    bf16 = {"mixed_precision": "bf16", "dtype": torch.bfloat16}
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, steps, **bf16)
    with rig.fresh_accelerate():
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy))
        run = rig.Loop("qwen3_moe", plugin, **bf16)
        ours = run.train(steps)
        engine = get_engine(run.model)
        assert engine is not None
        assert engine.compute_dtype == engine.reduce_dtype == torch.bfloat16
        for name, parameter in run.model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.dtype == torch.float32, name
            assert run.optimizer.state[parameter]["exp_avg"].dtype == torch.float32, name
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-2)
    return counted(engine.recorder.drain())


def hsdp(strategy: str) -> Counts:
    """Two replicas of two shards, on four ranks: as unpatched HSDP."""
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, 5, parallelism=(2, 2))
    room = {"slots_per_rank": 4} if strategy.startswith("fsep") else {}
    with rig.fresh_accelerate():
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy, **room))
        run = rig.Loop("qwen3_moe", plugin, parallelism=(2, 2))
        ours = run.train(5)
        expert = run.model.model.layers[0].mlp.experts.down_proj
        assert expert.device_mesh == run.model.lm_head.weight.device_mesh
        assert expert.device_mesh.shape == (2, 2)
    rig.assert_same(ours, theirs)
    return counted(_records(run))


def sharded_before_prepare(strategy: str, steps: int) -> Counts:
    """``patch_model(mesh=...)`` first: Accelerate leaves the homes alone."""
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, steps)
    with rig.fresh_accelerate():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = patch_model(tiny_model("qwen3_moe"), rig.eager(strategy=strategy), mesh=mesh)
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin(), model=model)
        ours = run.train(steps)
    rig.assert_same(ours, theirs)
    return counted(_records(run))


def preparation_fails() -> None:
    """When Accelerate's part fails, the experts are where they were, and a second try works."""
    with rig.fresh_accelerate():
        model = patch_model(tiny_model("qwen3_moe"), rig.eager(strategy="fsep"))
        before = dict(model.named_parameters())
        plugin = rig.fsdp_plugin(transformer_cls_names_to_wrap=["NoSuchLayer"], auto_wrap_policy="no_wrap")
        plugin.reshard_after_forward = "nonsense"
        with pytest.raises(Exception, match="reshard_after_forward"):
            rig.Loop("qwen3_moe", plugin, model=model)
        after = dict(model.named_parameters())
        engine = get_engine(model)
        assert engine is not None
        assert not engine.is_sharded
        experts = [name for name in before if ".experts." in name]
        assert [name for name in after if ".experts." in name] == experts
        assert all(after[name] is before[name] for name in experts)


def conflicting_plugin() -> None:
    """A plugin with another config than the model was patched with is refused."""
    with rig.fresh_accelerate():
        model = patch_model(tiny_model("qwen3_moe"), rig.eager(strategy="fsep"))
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="ep"))
        with pytest.raises((ValueError, RuntimeError), match="patched already"):
            rig.Loop("qwen3_moe", plugin, model=model)


def processes_that_train_alone() -> None:
    """Several processes of which Accelerate sees one each, since nobody asked for the CPU, are refused."""
    state = SimpleNamespace(distributed_type=DistributedType.NO, parallelism_config=None)
    with pytest.raises(ValueError, match=r"NO in one of 2 processes.*use_cpu=True"):
        check_state(state)
    with rig.fresh_accelerate():
        refused_alone()
        # With a mesh Accelerate is not needed.
        patch_model(tiny_model("qwen3_moe"), mesh=world_mesh())


def refused_alone() -> None:
    """One of two processes that Accelerate does not know of: by the plugin, by ``patch_model``, by the recipes."""
    alone = r"NO in one of 2 processes: each would train alone.*Accelerator\(cpu=True\).*use_cpu=True"
    with pytest.raises(ValueError, match=alone):
        Accelerator(fsdp_plugin=LaerFSDPPlugin())
    with pytest.raises(ValueError, match=alone):
        patch_model(tiny_model("qwen3_moe"))
    with pytest.raises(ValueError, match=alone):
        check_processes(PartialState())


def ddp_in_a_plain_loop() -> None:
    """Accelerate without an FSDP plugin would wrap the model by DDP: refused in ``prepare``."""
    with rig.fresh_accelerate():
        accelerator = Accelerator(cpu=True)
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        model = patch_model(tiny_model("qwen3_moe"))
        with pytest.raises(ValueError, match=r"DistributedDataParallel cannot hold.*LaerFSDPPlugin"):
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def saves_with_empty_ranks(folder: str) -> dict[str, np.ndarray]:
    """Two steps where the last rank owns no expert, then a sharded checkpoint; returns weights and moments."""
    with rig.fresh_accelerate():
        run = rig.Loop("qwen3_moe", _sharded_plugin(), sizes={"num_experts": 3})
        run.train(2)
        run.accelerator.save_state(folder)
        return _weights_and_moments(run)


def loads_on_fewer_ranks(folder: str) -> dict[str, np.ndarray]:
    """Loads that checkpoint and takes a step; returns weights and moments as loaded."""
    with rig.fresh_accelerate():
        run = rig.Loop("qwen3_moe", _sharded_plugin(), sizes={"num_experts": 3})
        run.train(1)  # so that there are moments to load into
        run.accelerator.load_state(folder)
        state = _weights_and_moments(run)
        run.train(1)
    return state


def _sharded_plugin() -> LaerFSDPPlugin:
    return rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="llep"), state_dict_type="SHARDED_STATE_DICT")


def _weights_and_moments(run: rig.Loop) -> dict[str, np.ndarray]:
    state = rig.gathered(run.model)
    for name, parameter in run.model.named_parameters():
        state[f"{name}.exp_avg"] = run.optimizer.state[parameter]["exp_avg"].full_tensor().numpy().copy()
    return state
