"""What rank processes run for the tests of the integrations. Each case asserts for itself, and returns
counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from hf_laer.telemetry.record import LayerRecord
from tests.integrations import rig
from tests.models import tiny_model

Counts = dict[str, int]


def counted(records: Any) -> Counts:
    """How many records, spilled tokens and moved replicas."""
    records = list(records)
    return {
        "records": len(records),
        "spilled": sum(record.spilled for record in records),
        "moved": sum(record.moved for record in records),
    }


def trl(folder: str, family: str, strategy: str, **settings: Any) -> Counts:
    """Ten AdamW steps of TRL SFT, patched and not: loss, gradient norm and weights are the same."""
    plain = {key: value for key, value in settings.items() if "checkpointing" not in key}
    theirs = rig.reference(rig.run_sft, folder, family, **plain)
    callback = LaerCallback(rig.eager(strategy=strategy))
    with rig.fresh_accelerate():
        ours = rig.run_sft(folder, family, [callback], **settings)
    rig.assert_same(ours, theirs)
    counts = counted(callback.records)
    for key in ("spilled", "moved"):
        assert sum(log[f"laer/{key}"] for log in ours["logs"]) == counts[key]
    return counts


def loop(family: str, strategy: str, plugin: dict[str, Any] | None = None, **settings: Any) -> Counts:
    """Ten AdamW steps of a plain Accelerate loop, patched and not: the same."""
    theirs = rig.reference(rig.run_loop, "", family, plugin, **settings)
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy), **plugin or {})
        run = rig.Loop(family, made, **settings)
        ours = run.train(10)
        engine = get_engine(run.model)
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain())


def checkpointed_by_accelerate(strategy: str, **settings: Any) -> Counts:
    """Accelerate's own activation checkpointing changes nothing."""
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe")
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(
            LaerFSDPPlugin, laer=rig.eager(strategy=strategy, **settings), activation_checkpointing=True
        )
        run = rig.Loop("qwen3_moe", made)
        ours = run.train(10)
        engine = get_engine(run.model)
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain())


def saved_and_loaded(folder: str, strategy: str, kind: str) -> Counts:
    """Five steps, ``save_state``, a fresh process's ``load_state``, five more: the same as ten in one go.

    Placements too go on as they were: every record of the second half is the same.
    """
    plugin = {"state_dict_type": kind, "laer": rig.eager(strategy=strategy, history=3)}
    with rig.fresh_accelerate():
        whole = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, **plugin))
        whole.train(5)
        whole.accelerator.save_state(folder)
        _records(whole)
        theirs = whole.train(5)
        expected = _records(whole)
    with rig.fresh_accelerate():
        second = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, **plugin))
        second.accelerator.load_state(folder)
        second.micro = 10
        ours = second.train(5)
        found = _records(second)
    rig.assert_same(ours, {**theirs, **{key: theirs[key][5:] for key in ("loss", "grad_norm")}})
    for mine, other in zip(found, expected, strict=True):
        assert mine.layer == other.layer
        np.testing.assert_array_equal(mine.loads_after, other.loads_after)
        assert (mine.moved, mine.spilled) == (other.moved, other.spilled)
    return counted(expected)


def baseline_checkpoint(folder: str, strategy: str, kind: str) -> Counts:
    """A checkpoint of unpatched FSDP2 resumes under a patched model, optimizer included."""
    with rig.fresh_accelerate():
        plain = rig.Loop("qwen3_moe", rig.fsdp_plugin(state_dict_type=kind))
        plain.train(5)
        plain.accelerator.save_state(folder)
        theirs = plain.train(5)
    with rig.fresh_accelerate():
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, state_dict_type=kind, laer=rig.eager(strategy=strategy))
        second = rig.Loop("qwen3_moe", plugin)
        second.accelerator.load_state(folder)
        second.micro = 10
        ours = second.train(5)
    rig.assert_same(ours, {**theirs, **{key: theirs[key][5:] for key in ("loss", "grad_norm")}})
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
