"""What rank processes run for the engine's tests: a patched model beside the unpatched one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer import LaerConfig, patch_model
from hf_laer.engine import Engine
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan import EMPTY
from tests.models import assert_close, full, settings_of, tiny_model, tokens

Batch = tuple[int, int]
UNEVEN: tuple[Batch, ...] = ((3, 7), (1, 5), (2, 9), (2, 4))


def world_mesh() -> Any:
    """The mesh over all ranks."""
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def patched(model: nn.Module, **config: Any) -> nn.Module:
    """The model, patched and sharded over all ranks, with thresholds at which small batches move too.

    ``fsep+llep:whole`` is the strategy with experts that live whole with an owner; each rank has room for a replica.
    """
    if "strategy" in config:
        config |= settings_of(config["strategy"])
    if config.get("strategy", "").startswith("fsep"):
        # As little room as the experts allow: with more, the exact split may level the ranks and nothing moves.
        ranks = config.get("group_size") or dist.get_world_size()
        config.setdefault("slots_per_rank", -(-num_experts(model) // ranks) + (config.get("expert_homes") == "whole"))
    settings = {"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0, **config}
    return patch_model(model, LaerConfig(**settings), mesh=world_mesh())


def num_experts(model: nn.Module) -> int:
    """E, by whichever name the model's family has it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(getattr(model.config, name) for name in names if hasattr(model.config, name))


def batch_of(rank: int, step: int = 0, batches: tuple[Batch, ...] = UNEVEN) -> torch.Tensor:
    """int64 ``[B, L]``, the ids of one rank and step; ranks differ in shape."""
    rows, length = batches[rank % len(batches)]
    return tokens(rows, length, seed=1000 * step + rank).to(torch.get_default_device())


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's loss; aux loss included where the model has one switched on."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def evaluate(model: nn.Module, plain: nn.Module, step: int) -> None:
    """Logits alike, between two steps of training: it uses the layout, and does not learn."""
    ids = batch_of(dist.get_rank(), step + 50)
    with torch.no_grad():
        assert_close(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits, "evaluation")
    model.train()
    plain.train()


def average_dense_gradients(model: nn.Module) -> None:
    """What FSDP does for the parameters that the engine does not shard."""
    for parameter in model.parameters():
        if not hasattr(parameter, "full_tensor") and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def reference_gradients(
    model: nn.Module, step: int = 0, batches: tuple[Batch, ...] = UNEVEN
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss and the mean gradients, by the unpatched model on one process."""
    model.zero_grad()
    losses = [loss_of(model, batch_of(rank, step, batches)) for rank in range(dist.get_world_size())]
    (torch.stack(losses).mean()).backward()
    return [loss.item() for loss in losses], {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


@dataclass(frozen=True)
class Expected:
    """What the unpatched small model makes of one step; shared between cases, not to be changed.

    Args:
        losses: Each rank's.
        gradients: Their mean's, by name.
        logits: This rank's.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor


def expected(family: str, step: int = 0, changes: dict[str, Any] | None = None) -> Expected:
    """One step of ``tiny_model(family, **changes)``, computed once for all cases of this process."""
    return _expected(family, step, tuple(sorted((changes or {}).items())), str(torch.get_default_device()))


@lru_cache(maxsize=128)
def _expected(family: str, step: int, changes: tuple[tuple[str, Any], ...], device: str) -> Expected:
    plain = tiny_model(family, **dict(changes))
    with torch.no_grad():
        logits = plain(input_ids=batch_of(dist.get_rank(), step)).logits
    return Expected(*reference_gradients(plain, step), logits)


def compare_gradients(model: nn.Module, want: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Every named parameter's gradient against the reference."""
    average_dense_gradients(model)
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert got.keys() == want.keys()
    for name, grad in got.items():
        if grad is None:
            assert want[name].abs().max() == 0, f"{name} has no gradient"
        else:
            assert_close(full(grad), want[name], name, tolerance)


def equal_to_unpatched(
    family: str,
    config: dict[str, Any],
    prepare: Callable[[nn.Module], None] | None = None,
    changes: dict[str, Any] | None = None,
    steps: int = 3,
) -> dict[str, int]:
    """Loss, logits and every gradient over some steps, the engine's placement moving in between.

    Returns:
        How much moved: ``spilled`` tokens, ``moved`` replicas.
    """
    rank = dist.get_rank()
    model = patched(tiny_model(family, **(changes or {})), **config)
    if prepare is not None:
        prepare(model)
    for step in range(steps):
        want = expected(family, step, changes)
        model.zero_grad()
        ids = batch_of(rank, step)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        assert_close(out.logits.detach(), want.logits, "logits")
        assert abs(out.loss.item() - want.losses[rank]) <= 1e-5 * abs(want.losses[rank])
        out.loss.backward()
        compare_gradients(model, want.gradients)
    return movement(model)


def movement(model: nn.Module) -> dict[str, int]:
    """What the engine moved since it was last asked."""
    engine = get_engine(model)
    assert engine is not None
    records = engine.recorder.drain()
    return {
        "spilled": sum(record.spilled for record in records),
        "moved": sum(record.moved for record in records),
        "records": len(records),
        "replicas": replicas(engine),
    }


def replicas(engine: Engine) -> int:
    """Copies beyond the first that the layouts in use foresee, over all layers."""
    tables = [(placement.slots, tuner._placed_for) for tuner in engine._tuners.values() for placement in tuner.layout]
    return sum(int((slots != EMPTY).sum()) - loads.shape[1] for slots, loads in tables)
