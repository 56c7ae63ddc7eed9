"""What the rank processes of these tests run: small data, one training run, its numbers.

Run in a rank process with a gloo process group. Sizes are such that nothing divides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.tensor import DTensor

from hf_laer.config import LaerConfig
from hf_laer.integrations.bench.fresh import fresh_accelerate
from tests.models import settings_of, tiny_model, tokens

# AdamW divides by sqrt(v) + eps: with the default, gradients of 1e-8 are all rounding, and move weights by a
# whole lr.
EPSILON = 1e-6
_REFERENCES: dict[str, dict[str, Any]] = {}


def eager(**settings: Any) -> LaerConfig:
    """A config under which even a tiny batch spills and moves experts."""
    if "strategy" in settings:
        settings |= settings_of(settings["strategy"])
    if settings.get("strategy", "").startswith(("fsep", "auto")):
        # As little room as up to 8 experts allow: with more, the exact split may level the ranks and nothing moves.
        room = -(-8 // dist.get_world_size()) if dist.is_initialized() else None
        more = room is not None and settings.get("expert_homes") == "whole"
        settings.setdefault("slots_per_rank", room + 1 if room is not None and more else room)
    return LaerConfig(**{"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0, "history": 1, **settings})


def reference(run: Callable[..., dict[str, Any]], *args: Any, **settings: Any) -> dict[str, Any]:
    """An unpatched run's numbers, computed once for all cases in this process that compare with it."""
    key = f"{run.__name__}{args[1:]}{sorted(settings.items())}"
    if key not in _REFERENCES:
        with fresh_accelerate():
            _REFERENCES[key] = run(*args, **settings)
    return _REFERENCES[key]


def gathered(model: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter in full, under the names of the bare model."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        full[name.replace("_checkpoint_wrapped_module.", "")] = value.detach().float().numpy().copy()
    return full


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses, gradient norms and weights of two runs agree."""
    for key in ("loss", "grad_norm", "eval_loss"):
        np.testing.assert_allclose(ours.get(key, []), theirs.get(key, []), rtol=tolerance, err_msg=key)
    far = distances(ours["weights"], theirs["weights"])
    far = {name: error for name, error in far.items() if not error <= tolerance}
    assert not far, f"weights differ: {far}"


def distances(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative distance of each tensor; the names must agree."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {
        name: float(np.linalg.norm(ours[name] - theirs[name]) / max(np.linalg.norm(theirs[name]), 1e-12))
        for name in theirs
    }


def fsdp_plugin(kind: Callable[..., Any] = FullyShardedDataParallelPlugin, **settings: Any) -> Any:
    """An FSDP2 plugin that wraps layer by layer and gathers whole state dicts."""
    defaults = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }
    return kind(**defaults | settings)


def made_optimizer(
    optimizer: dict[str, Any] | Callable[[Any], torch.optim.Optimizer] | None, model: nn.Module
) -> torch.optim.Optimizer:
    """AdamW with the given settings, or what the given function makes."""
    if callable(optimizer):
        return optimizer(model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=5e-3, eps=EPSILON, **optimizer or {})


def loop_batch(rank: int, micro: int) -> torch.Tensor:
    """int64 ``[B, L]``; ranks have batches of different shapes."""
    return tokens(1 + rank % 2, 4 + 3 * rank, seed=10 * micro + rank)


class Loop:
    """A plain Accelerate loop: an optimizer made before ``prepare``, accumulation, clipping; unequal batches.

    Args:
        family: The model's.
        plugin: The FSDP plugin.
        optimizer: Settings of AdamW, or what makes another optimizer of parameters.
        model: The model, where it is not just ``tiny_model(family)``.
        dtype: That model's.
        sizes: Changes to that model's.
        parallelism: HSDP's replicas and shards.
        accelerator: Settings of the ``Accelerator``.
    """

    def __init__(
        self,
        family: str,
        plugin: Any,
        *,
        optimizer: dict[str, Any] | Callable[[Any], torch.optim.Optimizer] | None = None,
        model: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        sizes: dict[str, Any] | None = None,
        parallelism: tuple[int, int] | None = None,
        **accelerator: Any,
    ) -> None:
        if parallelism is not None:
            ranks = dict(zip(("dp_replicate_size", "dp_shard_size"), parallelism, strict=True))
            accelerator["parallelism_config"] = ParallelismConfig(**ranks)
        settings = {"cpu": True, "gradient_accumulation_steps": 2, **accelerator}
        self.accelerator = Accelerator(fsdp_plugin=plugin, **settings)
        model = tiny_model(family, **sizes or {}).to(dtype) if model is None else model
        self.model, self.optimizer = self.accelerator.prepare(model, made_optimizer(optimizer, model))
        self.numbers: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.micro = 0

    def train(self, steps: int) -> dict[str, Any]:
        """Takes ``steps`` optimizer steps."""
        for _ in range(2 * steps):
            ids = self.batch(self.micro)
            self.micro += 1
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self._note(loss, norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {**self.numbers, "weights": gathered(self.model)}

    def batch(self, micro: int) -> torch.Tensor:
        """int64 ``[B, L]``: this rank's ids of one micro-batch."""
        return loop_batch(dist.get_rank(), micro)

    def _note(self, loss: torch.Tensor, norm: Any) -> None:
        self.numbers["loss"].append(loss.item())
        self.numbers["grad_norm"].append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))


def run_loop(
    _: str, family: str, plugin: dict[str, Any] | None = None, steps: int = 10, **settings: Any
) -> dict[str, Any]:
    """Steps of the unpatched loop."""
    return Loop(family, fsdp_plugin(**plugin or {}), **settings).train(steps)
