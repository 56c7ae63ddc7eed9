"""What rank processes run for the reports on recompute, compilation and determinism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_laer.integrations.transformers import get_engine
from tests.engine.cases import batch_of, loss_of, patched
from tests.models import full, tiny_model

Gradients = dict[str, torch.Tensor]


def recomputed(strategy: str) -> dict[str, int]:
    """B75. bf16 with and without checkpointing: bit for bit the same gradients, whichever way ties fall.

    Returns:
        Tokens that the routers sent elsewhere in the recompute, by kind of run.
    """
    counts = {}
    for ties in (True, False):
        _, want = _backward(strategy, ties=ties)
        for recompute in ("layer", "experts"):
            engine, got = _backward(strategy, ties=ties, recompute=recompute)
            _assert_equal(got, want)
            counts[f"{ties} {recompute}"] = _rerouted(engine)
        if ties:
            engine, got = _backward(strategy, ties=True, recompute="layer", drift=True)
            # Only a router's own gradient follows the choices that it makes in the recompute.
            _assert_equal(*({name: grad for name, grad in run.items() if "gate" not in name} for run in (got, want)))
            counts["drift"] = _rerouted(engine)
    with pytest.raises(ValueError, match="use_reentrant"):
        patched(tiny_model("qwen3_moe")).gradient_checkpointing_enable({"use_reentrant": True})
    return counts


def _backward(strategy: str, *, ties: bool, recompute: str | None = None, drift: bool = False) -> tuple[Any, Gradients]:
    """One micro-batch; all experts alike where ``ties``, the recompute then choosing others where ``drift``."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    for layer in model.model.layers if ties else ():
        nn.init.zeros_(layer.mlp.gate.weight)
    for layer in model.model.layers if drift else ():
        layer.mlp.gate.register_forward_hook(_choose_otherwise)
    patched(model, strategy=strategy, recompute=recompute or "layer")
    if recompute is not None:
        model.gradient_checkpointing_enable()
    loss_of(model, batch_of(dist.get_rank())).backward()
    return get_engine(model), _gradients(model)


def _choose_otherwise(router: nn.Module, arguments: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, index = out
    recomputing = torch._C._current_graph_task_id() != -1
    return (logits, weights, (index + 1) % 7) if recomputing else out


def _gradients(model: nn.Module) -> Gradients:
    """This rank's own, and the experts' in full."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _assert_equal(got: Gradients, want: Gradients) -> None:
    assert got.keys() == want.keys()
    differing = [name for name in got if not torch.equal(got[name], want[name])]
    assert not differing, differing


def _rerouted(engine: Any) -> int:
    return sum(layer.rerouted for layer in engine.layers.values())


def deterministic(family: str, strategy: str) -> None:
    """B79. Two runs of two steps in deterministic mode, which fills fresh memory with NaN: the same bits."""
    with _deterministic():
        runs = [_two_steps(family, strategy) for _ in range(2)]
    (losses, got), (more, again) = runs
    assert losses == more
    _assert_equal(got, again)
    assert all(grad.isfinite().all() for grad in got.values())


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _two_steps(family: str, strategy: str) -> tuple[list[float], Gradients]:
    model = patched(tiny_model(family), strategy=strategy, history=1, recompute="experts")
    model.gradient_checkpointing_enable()
    losses = []
    for step in range(2):
        loss = loss_of(model, batch_of(dist.get_rank(), step))
        loss.backward()
        losses.append(loss.item())
    return losses, _gradients(model)
