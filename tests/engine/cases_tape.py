"""Cases for plans that outlive their forward: recompute, several micro-batches in flight, evaluation in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.transformers.experts import mark_of
from tests.engine.cases import batch_of, compare_gradients, expected, loss_of, patched
from tests.models import tiny_model


def _recomputing(model: nn.Module, how: str) -> None:
    if how == "selective":
        from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable()


def checkpointed(family: str, strategy: str, recompute: str, how: str, order: str) -> dict[str, Any]:
    """Two micro-batches in flight, backward in either order, an evaluation between forward and backward."""
    model = tiny_model(family)
    if order == "before":
        _recomputing(model, how)
    patched(model, strategy=strategy, recompute=recompute, history=1)
    if order != "before":
        _recomputing(model, how)
    rank = dist.get_rank()
    wanted = [expected(family, step) for step in (0, 1)]
    losses = [loss_of(model, batch_of(rank, step)) for step in (0, 1)]
    with torch.no_grad():
        loss_of(model.eval(), batch_of(rank, 7))
    model.train()
    for loss in losses if order == "same" else reversed(losses):
        loss.backward()
    first, second = (want.gradients for want in wanted)
    compare_gradients(model, {name: first[name] + second[name] for name in first})
    for got, want in zip(losses, wanted, strict=True):
        assert abs(got.item() - want.losses[rank]) <= 1e-5 * abs(want.losses[rank])
    engine = get_engine(model)
    assert engine is not None
    records = engine.recorder.drain()
    return {
        "observed": len(records),
        "layers": len(engine.layers),
        "rerouted": sum(layer.rerouted for layer in engine.layers.values()),
    }


def kept_graph(family: str, recompute: str) -> None:
    """Backward twice through one graph doubles every gradient."""
    model = patched(tiny_model(family), strategy="llep", recompute=recompute)
    model.gradient_checkpointing_enable()
    want = expected(family).gradients
    loss = loss_of(model, batch_of(dist.get_rank()))
    loss.backward(retain_graph=True)
    loss.backward()
    compare_gradients(model, {name: 2 * grad for name, grad in want.items()})


class _Fickle(nn.Module):
    """An experts module whose router sends some tokens elsewhere in the recompute."""

    def __init__(self, experts: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.calls = experts, num_experts, 0

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            index = index.clone()
            index[::2] = (index[::2] + 1) % self.num_experts
        return self.experts(hidden, index, weights)


def fickle_router(recompute: str) -> int:
    """A recompute follows the forward's plan and routing, and counts the tokens that differ."""
    from torch.utils.checkpoint import noop_context_fn

    from hf_laer.tape import taped

    rank, experts = dist.get_rank(), 7
    plain, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    patched(model, strategy="llep", recompute=recompute)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(5 + rank, 34, generator=generator)
    index = torch.rand(len(hidden), experts, generator=generator).topk(2).indices
    weights = torch.rand(len(hidden), 2, generator=generator)
    results = []
    for which, fickle in ((plain, False), (model, True)):
        block = which.model.layers[0].mlp.experts
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        if fickle:
            module = _Fickle(block, experts)
            out = checkpoint(
                module, inputs[0], index, inputs[1], use_reentrant=False, context_fn=taped(noop_context_fn)
            )
        else:
            out = block(inputs[0], index, inputs[1])
        out.square().sum().backward()
        results.append((out.detach(), inputs[0].grad, inputs[1].grad))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    found = mark_of(model.model.layers[0].mlp.experts)
    assert found is not None
    assert found.layer is not None
    return found.layer.rerouted


def untaped_recompute() -> str:
    """A recompute that hf_laer has not been told of is refused."""
    model = patched(tiny_model("mixtral"), strategy="llep")
    ids = batch_of(dist.get_rank())
    hidden = model.model.embed_tokens(ids)
    out = checkpoint(model.model.layers[0].mlp, hidden, use_reentrant=False)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
