"""What rank processes run for the tests of the integrations. Each case asserts for itself, and returns
counts.
"""

from __future__ import annotations

from typing import Any

from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from tests.integrations import rig

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
