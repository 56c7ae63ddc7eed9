"""Cases for ``check_collectives``: ranks that part, each in a world of its own; and ranks that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer import LaerConfig, patch_model
from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan.types import Placement
from tests.engine.cases import batch_of, compare_gradients, expected, loss_of, patched
from tests.integrations import rig
from tests.models import tiny_model
from tests.reports.cases_faults import BAD, told, trained
from tests.reports.worlds import own_world


def parts(folder: str, fault: str, strategy: str, limit: float) -> dict[str, Any]:
    """Rank 1 does something else in its second step; returns what this rank was told."""
    with own_world(folder, limit):
        settings = {"strategy": strategy, "slots_per_rank": 4 if strategy == "fsep" else None}
        model = patched(tiny_model("qwen3_moe"), check_collectives=True, relayout_interval=100, **settings)
        trained(model, 1)
        step = {"more": _one_more, "evaluates": _evaluates, "sizes": _sizes}.get(fault, lambda model: trained(model, 1))
        if dist.get_rank() == BAD and fault in _CHANGES:
            _CHANGES[fault](model)
        return told(lambda: step(model))


def _replan(model: nn.Module) -> None:
    """Another rule for LLEP's split, another placement for FSEP."""
    engine = get_engine(model)
    assert engine is not None
    if engine.config.strategy == "fsep":
        for layer in engine.layers.values():
            tuner = engine.tuner_of(layer)
            moved = [Placement(np.array([[0, 1, 2, 6], [3, 4, 0, -1], [5, 6, 1, -1]]))]
            # Under the old one's digest, which the ranks tell each other anyway.
            tuner._current = tuner._current._replace(placements=moved)
    else:
        for layer in engine.layers.values():
            layer.config = replace(layer.config, capacity_factor=1.5)


def _reorder(model: nn.Module) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


_CHANGES = {"plan": _replan, "order": _reorder}


def _one_more(model: nn.Module) -> None:
    loss = loss_of(model, batch_of(dist.get_rank()))
    if dist.get_rank() == BAD:
        loss_of(model, batch_of(dist.get_rank()))
    loss.backward()


def _evaluates(model: nn.Module) -> None:
    trained(model, 1)
    if dist.get_rank() == BAD:
        with torch.no_grad():
            loss_of(model.eval(), batch_of(BAD))


def _sizes(model: nn.Module) -> None:
    engine = get_engine(model)
    assert engine is not None
    send = [1, 1, 2] if dist.get_rank() == BAD else [1, 1, 1]
    engine.comms.tokens.all_to_all(torch.ones(sum(send), 2), send, [1, 1, 1])


def prepared(folder: str, limit: float) -> dict[str, Any]:
    """Under Accelerate, rank 1 alone runs one more forward, which FSDP's collectives come first in."""
    with own_world(folder, limit), rig.fresh_accelerate():
        plugin = LaerFSDPPlugin, rig.eager(strategy="llep", check_collectives=True)
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin(plugin[0], laer=plugin[1]))
        run.train(1)
        return told(lambda: loss_of(run.model, batch_of(BAD)) if dist.get_rank() == BAD else None)


def sound(strategy: str, **settings: Any) -> int:
    """Checked training with checkpointing and an evaluation equals the unpatched model, on 1-D and HSDP meshes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grids = [(ranks,), (2, 2)] if ranks == 4 else [(ranks,)]
    for grid in grids:
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard")[-len(grid) :])
        eager = {"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0, "history": 1}
        config = LaerConfig(strategy=strategy, check_collectives=True, **eager, **settings)
        model = patch_model(tiny_model("qwen3_moe"), config, mesh=mesh)
        model.gradient_checkpointing_enable()
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            compare_gradients(model, expected("qwen3_moe", step).gradients)
            with torch.no_grad():
                loss_of(model.eval(), batch_of(rank, 7))
            model.train()
    engine = get_engine(model)
    assert engine is not None
    return sum(engine.comms.weights._check._numbers.values())
