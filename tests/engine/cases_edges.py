"""Cases at the edges: no tokens, unused experts, token groups, replicas, frozen parts, optimizers, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer import LaerConfig, patch_model
from hf_laer import strategy as strategy_module
from hf_laer.compute import grouped_gemm
from hf_laer.integrations.transformers import expert_parameters, get_engine
from hf_laer.layer import MoELayer
from hf_laer.plan import Plan
from tests.engine.cases import (
    average_dense_gradients,
    batch_of,
    compare_gradients,
    equal_to_unpatched,
    expected,
    loss_of,
    movement,
    patched,
    reference_gradients,
    world_mesh,
)
from tests.models import assert_close, full, settings_of, tiny_model, tokens


def block_results(
    block: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and input gradients of an experts module."""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = block(hidden, index, weights)
    if not out.requires_grad:
        # Eager experts without a token return a constant.
        assert len(hidden) == 0
        return out, torch.zeros_like(hidden), torch.zeros_like(weights)
    out.sin().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return out.detach(), hidden.grad, weights.grad


def routed(family: str, strategy: str, counts: list[int], routing: str, config: dict[str, Any]) -> dict[str, int]:
    """Experts modules alone, under a given routing and given tokens per rank (0 too), three times over."""
    plain, model = tiny_model(family), tiny_model(family)
    patched(model, strategy=strategy, history=1, **config)
    rank, world = dist.get_rank(), dist.get_world_size()
    want_block, block = (m.model.layers[-1].mlp.experts for m in (plain, model))
    for step in range(3):
        want_block.zero_grad()
        block.zero_grad()
        results = []
        for source in range(world):
            inputs = _routed_inputs(counts[source], routing, 10 * step + source)
            results.append(block_results(want_block, *inputs))
        got = block_results(block, *_routed_inputs(counts[rank], routing, 10 * step + rank))
        for name, ours, theirs in zip(("out", "hidden", "weights"), got, results[rank], strict=True):
            assert_close(ours, theirs, f"{name} at step {step}")
        for name, parameter in block.named_parameters():
            want = want_block.get_parameter(name).grad
            want = torch.zeros(parameter.shape) if want is None else want / world
            assert_close(full(parameter.grad), want, name)
    return movement(model)


def _routed_inputs(count: int, routing: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 34, generator=generator)
    weights = torch.rand(count, 2, generator=generator)
    if routing == "one expert":
        index = torch.tensor([[0, 1]]).expand(count, 2)
    elif routing == "last rank":
        index = torch.tensor([[6, 5]]).expand(count, 2)
    else:
        index = torch.rand(count, 7, generator=generator).topk(2).indices
    return hidden, index, weights


def at_home(family: str, **config: Any) -> dict[str, int]:
    """Spilled to the ranks that tokens come from, which small sizes are never predicted to pay."""
    seen: list[tuple[Plan, ...]] = []

    def last(plans: tuple[Plan, ...], *args: Any, **told: Any) -> Plan:
        seen.append(plans)
        return plans[-1]

    with patch.object(strategy_module, "cheapest", last):
        moved = equal_to_unpatched(family, {"strategy": "llep", "imbalance_threshold": None, **config})
    differ = [plans[-1].digest() != plans[1].digest() for plans in seen if len(plans) > 1]
    return moved | {"at home": sum(differ)}


def _two_steps(family: str, model: nn.Module) -> dict[str, int]:
    """Every gradient of two micro-batches against the unpatched model's; how much moved."""
    for step in range(2):
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        compare_gradients(model, expected(family, step).gradients)
    return movement(model)


def grouped(family: str, strategy: str, group_size: int) -> dict[str, int]:
    """Token groups below the world: homes stay on the whole mesh, gradients of all groups add up."""
    model = patched(tiny_model(family), strategy=strategy, group_size=group_size, history=1)
    return _two_steps(family, model)


def replicated(family: str, strategy: str) -> dict[str, int]:
    """HSDP: two replicas of two shards; averaged once, over all four."""
    model = tiny_model(family)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind: dict[str, Any] = settings_of(strategy)
    config = LaerConfig(**kind, min_tokens_per_gemm=1, imbalance_threshold=1.0, history=1)
    patch_model(model, config, mesh=mesh)
    return _two_steps(family, model)


def frozen(family: str, strategy: str, frozen_names: tuple[str, ...]) -> None:
    """Frozen parameters get no gradient, the others get theirs."""
    plain, model = tiny_model(family), tiny_model(family)
    for which in (plain, model):
        for name, parameter in which.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen_names))
    patched(model, strategy=strategy)
    _, want = reference_gradients(plain)
    loss_of(model, batch_of(dist.get_rank())).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.endswith(frozen_names), name
        if parameter.grad is not None and not hasattr(parameter, "full_tensor"):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        if parameter.grad is not None:
            assert_close(full(parameter.grad), want[name], name)


def stepped(family: str, strategy: str, optimizer: str, made: str) -> None:
    """Five optimizer steps with clipping; weights and moments equal the unpatched model's."""
    plain, model = tiny_model(family), tiny_model(family)
    if made == "after":
        patched(model, strategy=strategy, history=1)
    ours, theirs = _optimizer(optimizer, model), _optimizer(optimizer, plain)
    if made == "before":
        patched(model, strategy=strategy, history=1)
    for step in range(5):
        _, want = reference_gradients(plain, step)
        for name, parameter in plain.named_parameters():
            parameter.grad = want[name]
        theirs.step()
        ours.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        average_dense_gradients(model)
        ours.step()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(got.data), want.data, name, 2e-5)
        for key, state in theirs.state[want].items():
            if torch.is_tensor(state) and state.ndim:
                assert_close(full(ours.state[got][key]), state, f"{key} of {name}", 1e-4)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)


def generated(family: str, strategy: str) -> None:
    """Greedy generation gives the unpatched model's tokens; every rank runs as many forwards."""
    plain, model = tiny_model(family).eval(), tiny_model(family).eval()
    patched(model, strategy=strategy)
    prompt = tokens(2, 5, seed=dist.get_rank())
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), plain.generate(prompt, **settings))
    assert movement(model)["records"] == 0


def auxiliary(family: str, strategy: str) -> None:
    """The routers' auxiliary loss is there, equal, and has its gradient."""
    plain, model = (tiny_model(family, router_aux_loss_coef=0.5) for _ in range(2))
    patched(model, strategy=strategy)
    _, want = reference_gradients(plain)
    for which in (plain, model):
        which.config.output_router_logits = True
    rank = dist.get_rank()
    _, more = reference_gradients(plain)
    model.zero_grad()
    ids = batch_of(rank)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    theirs = plain(input_ids=ids, labels=ids, use_cache=False)
    assert len(out.router_logits) == len(theirs.router_logits)
    assert_close(out.aux_loss, theirs.aux_loss, "aux loss")
    out.loss.backward()
    compare_gradients(model, more)
    router = next(name for name in want if name.endswith(("gate.weight", "router.weight")))
    assert not torch.allclose(want[router], more[router])


# Few tokens at a time, so that most steps have none whose choice rounding decides about.
SOME = ((3, 14), (2, 9))
Gradients = dict[str, torch.Tensor]


def half_precision(
    family: str,
    strategy: str,
    steps: int = 12,
    changes: dict[str, Any] | None = None,
    make: Callable[..., nn.Module] = tiny_model,
    least: int | None = None,
    **config: Any,
) -> dict[str, tuple[float, float]]:
    """Errors of bf16 gradients against fp32, the unpatched model's and ours, by parameter, over several batches.

    Of these at least so many, or half, must be routed as in fp32.
    """
    start, expected_steps = _half_expected(make, family, steps, tuple(sorted((changes or {}).items())))
    model = make(family, dtype=torch.bfloat16, **(changes or {}))
    model.load_state_dict(start)
    patched(model, strategy=strategy, **config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A handful of numbers has no statistics: tensors that small count together.
    keys = {name: name if p.numel() >= 32 else "small" for name, p in trained.items()}
    squares, alike = {key: [0.0, 0.0, 0.0] for key in keys.values()}, 0
    for step, routed, want, theirs in expected_steps:
        model.zero_grad()
        with _routing(model) as ours:
            loss_of(model, batch_of(dist.get_rank(), step, SOME)).backward()
        average_dense_gradients(model)
        if not _all_ranks(_same_experts(ours, routed)):
            continue
        alike += 1
        for name, parameter in trained.items():
            for at, grad in enumerate((theirs[name], full(parameter.grad))):
                squares[keys[name]][at] += float((grad.float() - want[name]).square().sum())
            squares[keys[name]][2] += float(want[name].square().sum())
    assert alike >= (least or steps // 2), f"routed as in fp32 in {alike} steps only"
    return {name: ((a / norm) ** 0.5, (b / norm) ** 0.5) for name, (a, b, norm) in squares.items()}


@contextmanager
def _routing(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The experts chosen in the block's forwards, layer by layer: int64 ``[T, K]`` each, in ascending order."""
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        seen.append(next(one for one in given if not one.is_floating_point()).sort(-1).values)

    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _same_experts(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _all_ranks(here: bool) -> bool:
    """Whether it holds on every rank."""
    everyone = torch.tensor([int(here)])
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    return bool(everyone.item())


@lru_cache(maxsize=16)
def _half_expected(
    make: Callable[..., nn.Module], family: str, steps: int, changes: tuple[tuple[str, Any], ...]
) -> tuple[Gradients, list[tuple[int, list[torch.Tensor], Gradients, Gradients]]]:
    """The unpatched model's bf16 weights, and for each of some steps its number, this rank's routing, and the gradients
    in fp32 and in bf16; computed once.

    Only steps in which bf16 chooses the experts that fp32 does: where a token's choice is near a tie, rounding decides
    about it, and one other expert is more than all that rounding does else.
    """
    exact = make(family, **dict(changes))
    plain = make(family, dtype=torch.bfloat16, **dict(changes))
    plain.load_state_dict(exact.state_dict())
    exact.load_state_dict(plain.state_dict())
    found: list[tuple[int, list[torch.Tensor], Gradients, Gradients]] = []
    for step in range(4 * steps):
        routed, gradients = [], []
        for model in (exact, plain):
            with _routing(model) as seen:
                gradients.append(reference_gradients(model, step, SOME)[1])
            routed.append(list(seen))
        if _all_ranks(_same_experts(*routed)):
            layers = len(routed[0]) // dist.get_world_size()
            mine = routed[0][layers * dist.get_rank() :][:layers]
            found.append((step, mine, *gradients))
        if len(found) == steps:
            break
    return plain.state_dict(), found


def shares(dtypes: list[tuple[str | None, str | None]]) -> list[float]:
    """What routing weights are scaled by in backward, for dtypes of products and of gradients on their way."""
    asked: list[float] = []
    share = MoELayer._share

    def noted(layer: MoELayer, *told: torch.dtype) -> float:
        asked.append(share(layer, *told))
        return asked[-1]

    found = []
    for compute_dtype, reduce_dtype in dtypes:
        model = patched(tiny_model("mixtral"), strategy="llep", compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        asked.clear()
        with patch.object(MoELayer, "_share", noted):
            loss_of(model, batch_of(dist.get_rank())).backward()
        assert len(set(asked)) == 1
        found.append(asked[0])
    return found


def mesh_and_state() -> None:
    """Names, classes and global shapes stay; the state dict gathers to the unpatched one; FSDP may ignore experts."""
    plain, model = tiny_model("gpt_oss"), tiny_model("gpt_oss")
    patched(model, strategy="fsep")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert expert_parameters(model) == {p for p in model.parameters() if hasattr(p, "full_tensor")}
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name]), name
    engine = get_engine(model)
    assert engine is not None
    assert patch_model(model, engine.config, mesh=world_mesh()) is model


def large_groups_alone(strategy: str) -> dict[str, int]:
    """Groups of three rows or more are multiplied alone, the others by ``grouped_mm``, as on a GPU."""
    sizes = {"hidden_size": 48, "intermediate_size": 40}
    takes = patch.object(grouped_gemm, "_kernel_takes", lambda left, right: len(left) > 0 and len(right) > 0)
    with takes, patch.object(grouped_gemm, "_ALONE_FLOPS", 3 * 2 * 48 * 80), watched_calls() as calls:
        moved = equal_to_unpatched("gpt_oss", {"strategy": strategy, "history": 1}, None, sizes)
    return {**moved, **calls}


@contextmanager
def watched_calls() -> Iterator[dict[str, int]]:
    """Counts stretches with groups alone, with groups together, and with both."""
    calls = {"alone": 0, "together": 0, "both": 0}
    cut = grouped_gemm.Groups._cut

    def counting(self: grouped_gemm.Groups, stacks: tuple[int, ...]) -> list[grouped_gemm.Stretch]:
        found = cut(self, stacks)
        for stretch in found:
            alone, together = bool(stretch.alone), stretch.start < stretch.together
            calls["alone"] += alone
            calls["together"] += together
            calls["both"] += alone and together
        return found

    with patch.object(grouped_gemm.Groups, "_cut", counting):
        yield calls
