"""Cases in which a rank fails, or does less than the others. Each returns what this rank was told, and how soon."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_laer.comm.watch import CollectiveError
from tests.engine.cases import batch_of, loss_of, patched
from tests.models import tiny_model
from tests.reports.worlds import own_world

BAD = 1


def trained(model: nn.Module, steps: int) -> None:
    """Forward and backward on batches that differ between ranks."""
    for step in range(steps):
        loss_of(model, batch_of(dist.get_rank(), step)).backward()


def told(what: Callable[[], Any]) -> dict[str, Any]:
    """The error that ``what`` raises, and the seconds it took."""
    started = time.monotonic()
    try:
        what()
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "cause": type(error.__cause__).__name__,
            "layer": error.where.layer if isinstance(error, CollectiveError) else "",
            "seconds": time.monotonic() - started,
        }
    return {"kind": "", "message": "no error", "seconds": time.monotonic() - started}


def fails(folder: str, strategy: str, fault: str, limit: float) -> dict[str, Any]:
    """Rank 1 fails in its second step, in the place that ``fault`` names; the others go on with theirs."""
    with own_world(folder, limit):
        model = patched(tiny_model("qwen3_moe"), strategy=strategy)
        if fault == "raises in recompute":
            model.gradient_checkpointing_enable()
        trained(model, 1)
        if dist.get_rank() == BAD:
            _break(model, fault)
        return told(lambda: trained(model, 1))


def _break(model: nn.Module, fault: str) -> None:
    block = model.model.layers[1].mlp
    if fault == "raises in forward":
        block.register_forward_pre_hook(_raise)
    elif fault == "raises in recompute":
        block.register_forward_pre_hook(lambda *_: _raise() if torch._C._current_graph_task_id() != -1 else None)
    else:
        block.register_full_backward_pre_hook(_raise)


def _raise(*_: Any) -> None:
    raise ArithmeticError("rank 1 is broken")


def has_fewer_batches(folder: str, strategy: str, limit: float) -> dict[str, Any]:
    """Rank 1's data end a step early."""
    with own_world(folder, limit):
        model = patched(tiny_model("qwen3_moe"), strategy=strategy)
        return told(lambda: trained(model, 2 if dist.get_rank() == BAD else 3))


def dies(folder: str, strategy: str) -> None:
    """Rank 1 is killed in its second step; the others leave what they were told in files."""
    rank = dist.get_rank()
    model = patched(tiny_model("qwen3_moe"), strategy=strategy)
    trained(model, 1)
    if rank == BAD:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    result = told(lambda: trained(model, 1))
    Path(folder, f"{rank}.txt").write_text(f"{result['seconds']:.1f} {result['message']}")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def is_late(folder: str, limit: float) -> list[str]:
    """Rank 1 comes late, but in time; returns what this rank's log says meanwhile."""
    kept = _Kept()
    logger = logging.getLogger("hf_laer.comm.watch")
    logger.addHandler(kept)
    try:
        with own_world(folder, limit):
            model = patched(tiny_model("qwen3_moe"), strategy="fsep")
            trained(model, 1)
            if dist.get_rank() == BAD:
                time.sleep(0.75 * limit)
            trained(model, 1)
    finally:
        logger.removeHandler(kept)
    return kept.messages
