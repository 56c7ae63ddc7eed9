"""What rank processes run for the tests of the integrations. Each function is one case; it asserts for itself."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_laer.integrations.trl import LaerCallback
from tests.integrations import rig


def trl_equals_fsdp2(folder: str, family: str, strategy: str, **settings: Any) -> dict[str, Any]:
    """Ten AdamW steps of TRL SFT, patched and unpatched: loss, gradient norm and weights are the same."""
    with rig.fresh_accelerate():
        theirs = rig.run_sft(f"{folder}/base", family, **settings)
    with rig.fresh_accelerate():
        callback = LaerCallback(rig.eager(strategy=strategy))
        ours = rig.run_sft(f"{folder}/laer", family, [callback], **settings)
    rig.assert_same(ours, theirs)
    logs = [log for log in ours["logs"] if "loss" in log]
    assert all("laer/imbalance_after" in log for log in logs)
    return {key: sum(log[f"laer/{key}"] for log in logs) for key in ("spilled", "moved")} | {
        "records": len(callback.records)
    }
