"""What rank processes run for the tests of recorded traces. Each counts what its routers chose, by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer import LaerConfig, patch_model, record_trace
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from tests.engine.cases import batch_of, loss_of
from tests.integrations import rig, rig_trl
from tests.models import tiny_model


class Counter:
    """Counts each experts module's choices, step by step, while ``on``."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[list[np.ndarray]] = []
        self.on = True
        engine = get_engine(model)
        assert engine is not None
        for layer in engine.layers.values():
            self.counts.append([])
            layer.module.register_forward_pre_hook(self._hook(self.counts[-1], layer.spec.num_experts))

    def _hook(self, counts: list[np.ndarray], experts: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self.on and module.training:
                counts.append(np.bincount(args[1].flatten().numpy(), minlength=experts))

        return hook

    def loads(self) -> np.ndarray:
        """int64 ``[steps, layers, E]``, this rank's."""
        return np.stack([np.stack(layer) for layer in self.counts], axis=1)


def by_callback(folder: str) -> np.ndarray:
    """Three steps of two micro-batches of TRL SFT, evaluated in between; this rank's counts."""
    callback = LaerCallback(rig.eager(strategy="fsep"), trace=f"{folder}/trace.npz")
    with rig.fresh_accelerate():
        evaluated = {"eval_strategy": "steps", "eval_steps": 2}
        trainer = rig_trl.sft_trainer(folder, "qwen3_moe", [callback], max_steps=3, **evaluated)
        counter = Counter(trainer.model)
        trainer.train()
    engine = get_engine(trainer.model)
    assert engine is not None
    assert engine.watcher is None, "recording has ended"
    assert callback.state()["args"]["trace"] == f"{folder}/trace.npz"
    return counter.loads()


def by_hand(folder: str, name: str, shape: tuple[int, ...], config: dict[str, Any]) -> np.ndarray:
    """Three recorded steps, one without gradients, one after the recording; layers are recomputed in backward."""
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    model = tiny_model("gpt_oss")
    settings = LaerConfig(min_tokens_per_gemm=1, imbalance_threshold=1.0, ranks_per_node=2, **config)
    patch_model(model, settings, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    model.gradient_checkpointing_enable()
    counter = Counter(model)
    step(model, counter, -1)  # before the recording
    counter.counts[0].clear(), counter.counts[1].clear()
    with record_trace(model, f"{folder}/{name}.npz"):
        for at in range(3):
            step(model, counter, at)
        counter.on = False
        with torch.no_grad():
            loss_of(model, batch_of(dist.get_rank(), 9))
    step(model, counter, 3)
    return counter.loads()


def step(model: nn.Module, counter: Counter, at: int) -> None:
    """One training step; what backward recomputes is not counted."""
    loss = loss_of(model, batch_of(dist.get_rank(), at + 1))
    was, counter.on = counter.on, False
    loss.backward()
    counter.on = was


def all_by_hand(folder: str, runs: dict[str, tuple[tuple[int, ...], dict[str, Any]]]) -> dict[str, np.ndarray]:
    """:func:`by_hand` for each mesh and config."""
    return {name: by_hand(folder, name, shape, config) for name, (shape, config) in runs.items()}
