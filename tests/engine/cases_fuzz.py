"""One random example of everything at once: a patched model on some ranks beside the unpatched one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hf_laer import LaerConfig, patch_model
from hf_laer.integrations.transformers.families import experts_modules
from tests.engine.cases import movement
from tests.models import full, tiny_model, tokens

_EXPERTS = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
_PARTS: dict[str, Callable[[str], bool]] = {
    "router": lambda name: ".gate." in name or ".router." in name,
    "gate_up": lambda name: name.endswith("experts.gate_up_proj"),
    "down": lambda name: name.endswith("experts.down_proj"),
    "bias": lambda name: "experts." in name and name.endswith("_bias"),
    "dense": lambda name: not any(part in name for part in (".experts.", ".gate.", ".router.")),
}
PARTS = tuple(_PARTS)


@dataclass(frozen=True)
class Example:
    """What is drawn.

    Args:
        ranks: Processes.
        family: The model's.
        experts: E.
        top_k: K.
        config: Settings of :class:`LaerConfig`.
        routing: ``model`` (the router's own), ``ties`` (a router of zeros), or who is chosen: ``random``, ``skewed``,
            ``one`` (the first K experts), ``last``, ``moving`` (K experts, other ones on each rank, step and layer).
            In bf16 the router's own means random.
        batches: Rows and length of each rank's ids; with no rows there is one, whose tokens reach no expert.
        frozen: Keys of ``PARTS`` that are not trained.
        frozen_layer: Only in this layer, or in all.
        replicas: Of the whole set of shards (HSDP).
        bf16: The model's dtype, else float32.
        checkpointing: Activation checkpointing.
        accumulate: Gradients of both micro-batches add up.
        evaluate: An evaluation between forward and backward.
        layers: The model's.
        twice: Each backward runs a second time, and its gradients add up.
        change: Between micro-batches weights are changed through ``.data``, which autograd does not count.
    """

    ranks: int
    family: str
    experts: int
    top_k: int
    config: dict[str, Any]
    routing: str
    batches: tuple[tuple[int, int], ...]
    frozen: tuple[str, ...] = ()
    frozen_layer: int | None = None
    replicas: int = 1
    bf16: bool = False
    checkpointing: bool = False
    accumulate: bool = False
    evaluate: bool = False
    layers: int = 2
    twice: bool = False
    change: bool = False


@dataclass
class _Now:
    """Whose micro-batch is running, for the routing."""

    source: int = 0
    step: int = 0


class Subject:
    """One model of the example; all of an example are alike but for patch and dtype."""

    def __init__(self, example: Example, dtype: torch.dtype) -> None:
        self.example, self.now = example, _Now()
        sizes: dict[str, Any] = {
            _EXPERTS.get(example.family, "num_experts"): example.experts,
            "num_experts_per_tok": example.top_k,
        }
        if example.family == "deepseek_v3":
            sizes |= {"n_group": 1, "topk_group": 1}
        if example.family == "qwen3_next":
            sizes["layer_types"] = ["full_attention"] * example.layers
        self.model = tiny_model(example.family, num_hidden_layers=example.layers, **sizes).to(dtype)
        for name, parameter in self.model.named_parameters():
            self._prepare(name, parameter)
        for layer, module in enumerate(experts_modules(self.model).values()):
            module.register_forward_pre_hook(partial(self._choose, layer))
            module.register_forward_hook(self._refill)

    def _prepare(self, name: str, parameter: nn.Parameter) -> None:
        layer = self.example.frozen_layer
        if layer is None or f"layers.{layer}." in name:
            parameter.requires_grad_(not any(_PARTS[part](name) for part in self.example.frozen))
        if self.example.routing == "ties" and _PARTS["router"](name):
            parameter.data.zero_()

    def _choose(self, layer: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Other experts than the router's, under its weights; no token at all where the rank has no rows."""
        hidden, index, weights = args
        if self.example.bf16:
            # Rounding may tip the router's own choice, here as in the unpatched model: these weights do without it. On
            # every rank: where all but the router is frozen, a rank that kept its weights would have a backward alone.
            weights = hidden[:, : self.example.top_k].sigmoid().to(weights.dtype)
        if self.example.batches[self.now.source][0] == 0:
            return hidden[:0], index[:0], weights[:0]
        if not self.example.bf16 and self.example.routing in ("model", "ties"):
            return args
        seed = 100 * self.now.step + 10 * self.now.source + layer
        return hidden, chosen(self.example, len(index), seed).to(index.dtype), weights

    def _refill(self, module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        """Zeros for the tokens that :meth:`_choose` kept from the experts."""
        rows, length = self.example.batches[self.now.source]
        return out if rows else torch.cat([out, out.new_zeros(length, out.shape[1])])

    def loss(self, source: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A scalar and the logits of rank ``source``'s micro-batch."""
        self.now.source, self.now.step = source, step
        rows, length = self.example.batches[source]
        ids = tokens(max(rows, 1), length, seed=100 * step + source)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits.float().sin().sum() / 50, logits.detach()

    def mean_gradients(self) -> dict[str, torch.Tensor]:
        """The trained parameters', float32, averaged over ranks where nobody has done so; ``.grad`` is left alone."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        got = {name: torch.zeros(p.shape) if p.grad is None else full(p.grad).float() for name, p in trained.items()}
        dense = [got[name] for name, p in trained.items() if not hasattr(p, "full_tensor")]
        if dense:
            flat = torch.cat([grad.flatten() for grad in dense])
            dist.all_reduce(flat)
            for grad, mean in zip(dense, (flat / dist.get_world_size()).split([d.numel() for d in dense]), strict=True):
                grad.copy_(mean.view(grad.shape))
        return got


def chosen(example: Example, count: int, seed: int) -> torch.Tensor:
    """int64 ``[count, K]``, distinct in each row."""
    generator = torch.Generator().manual_seed(seed)
    experts, top_k = example.experts, example.top_k
    scores = torch.rand(count, experts, generator=generator)
    if example.routing == "one":
        scores = -torch.arange(experts).float().expand(count, -1)
    elif example.routing == "last":
        scores = torch.arange(experts).float().expand(count, -1)
    elif example.routing == "moving":
        scores = (torch.arange(experts).float() - seed % 100 // 10 - seed).remainder(experts).expand(count, -1)
    elif example.routing == "skewed":
        scores = scores * torch.linspace(0.2, 1.0, experts) ** 2
    return scores.topk(top_k).indices


@cache
def _mesh(ranks: int, replicas: int) -> DeviceMesh:
    """Made once: each two-dimensional one costs process groups."""
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def compare(example: Example) -> dict[str, int]:
    """Logits and every gradient of two micro-batches against the unpatched model's; how much moved."""
    dtype = torch.bfloat16 if example.bf16 else torch.float32
    plain, ours = Subject(example, dtype), Subject(example, dtype)
    exact = Subject(example, torch.float32) if example.bf16 else plain
    exact.model.load_state_dict(plain.model.state_dict())
    patch_model(ours.model, LaerConfig(**example.config), mesh=_mesh(example.ranks, example.replicas))
    if example.checkpointing:
        ours.model.gradient_checkpointing_enable()
    for step in range(2):
        _step(ours, plain, exact, step)
    return movement(ours.model)


def _step(ours: Subject, plain: Subject, exact: Subject, step: int) -> None:
    example, rank = ours.example, dist.get_rank()
    results = []
    for subject in (ours, plain, exact) if exact is not plain else (ours, plain):
        if not example.accumulate:
            subject.model.zero_grad()
        loss, logits = subject.loss(rank, step)
        if example.evaluate and subject is ours:
            _evaluate(subject, step)
        if loss.requires_grad:
            if example.twice:
                loss.backward(retain_graph=True)
            loss.backward()
        results.append((logits.float(), subject.mean_gradients()))
        if example.change:
            _change(subject.model)
    (got, grads), (theirs, their_grads), (want, exact_grads) = results[0], results[1], results[-1]
    agree(got, theirs, want, f"logits at step {step}", 0.0)
    scale = max((float(grad.norm()) for grad in exact_grads.values()), default=0.0)
    assert grads.keys() == exact_grads.keys()
    for name, grad in grads.items():
        if ".experts." in name:
            unused = exact_grads[name].flatten(1).abs().sum(1) == 0
            assert not grad[unused].any(), f"{name}: {unused.nonzero().flatten().tolist()} should have exact zeros"
        agree(grad, their_grads[name], exact_grads[name], f"{name} at step {step}", scale)
    for name, parameter in ours.model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, f"{name} is frozen and has a gradient"


def _change(model: nn.Module) -> None:
    """Other weights, behind autograd's back; a power of two, which rounds nothing."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            data = parameter.data
            (data.to_local() if isinstance(data, DTensor) else data).mul_(2 if "down" in name else 0.5)


def _evaluate(subject: Subject, step: int) -> None:
    """Another batch, between a forward and its backward."""
    with torch.no_grad():
        subject.model.eval()
        subject.loss(dist.get_rank(), 7)
        subject.model.train()
    subject.now.step = step


def agree(got: torch.Tensor, theirs: torch.Tensor, want: torch.Tensor, what: str, scale: float) -> None:
    """Within 1e-5 in float32; in bf16 the error is near the unpatched model's own.

    Args:
        got: What the patched model has.
        theirs: What the unpatched model has in the same dtype.
        want: What it has in float32.
        what: For the message.
        scale: The largest norm of any gradient: where terms cancel, what is left is rounding of their size.
    """
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    norm, error = float(want.double().norm()), float((got.double() - want.double()).norm())
    allowed = 1e-5 * norm + 3e-7 * scale
    if theirs is not want:
        allowed = 2 * float((theirs.double() - want.double()).norm()) + 4e-3 * norm + 1e-3 * scale
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e} (norm {norm:.2e})"
