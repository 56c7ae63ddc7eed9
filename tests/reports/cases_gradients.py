"""What rank processes run for the reports on gradients and numbers. Each case compares with the unpatched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_laer import LaerConfig, patch_model
from hf_laer.integrations.transformers import get_engine
from hf_laer.layer import Run
from tests.engine.cases import (
    average_dense_gradients,
    batch_of,
    compare_gradients,
    expected,
    loss_of,
    patched,
    reference_gradients,
)
from tests.engine.cases_edges import block_results
from tests.models import assert_close, full, tiny_model, tokens

EIGHT: dict[str, dict[str, int]] = {
    family: {key: 8} for family, key in (("qwen3_moe", "num_experts"), ("qwen2_moe", "num_experts"))
} | {family: {"num_local_experts": 8} for family in ("mixtral", "gpt_oss")}


def chosen(module: nn.Module, experts: tuple[int, ...]) -> None:
    """Sends every token of an experts module to these experts, under the router's weights."""

    def choose(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = args
        return hidden, torch.tensor(experts, dtype=index.dtype).expand(len(index), -1), weights

    module.register_forward_pre_hook(choose)


# B12


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def unwritten_memory(strategy: str) -> None:
    """Three steps, some experts empty, in clean and in poisoned memory: finite, and bitwise equal."""
    for dtype in (torch.bfloat16, torch.float32):
        clean = _three_steps(strategy, dtype)
        with poisoned():
            dirty = _three_steps(strategy, dtype, poison=True)
        for step, (ours, theirs) in enumerate(zip(dirty, clean, strict=True)):
            for name, value in ours.items():
                assert value.isfinite().all(), f"{name} at step {step} in {dtype}"
                assert torch.equal(value, theirs[name]), f"{name} at step {step} in {dtype}"


def _three_steps(strategy: str, dtype: torch.dtype, poison: bool = False) -> list[dict[str, torch.Tensor]]:
    model = patched(tiny_model("gpt_oss", dtype=dtype), strategy=strategy, history=1)
    chosen(model.model.layers[1].mlp.experts, (1, 6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    engine = get_engine(model)
    assert engine is not None
    results = []
    for step in range(3):
        if poison:
            for buffer in engine.pool._buffers.values():
                buffer.fill_(torch.nan)
        loss = loss_of(model, batch_of(dist.get_rank(), step))
        loss.backward()
        average_dense_gradients(model)
        results.append({"loss": loss.detach()} | {name: full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return results


# B13, B14


def every_gradient(family: str, strategy: str) -> list[str]:
    """The names of all parameters whose gradient equals the unpatched model's, and is not zero."""
    plain, model = (tiny_model(family, **EIGHT[family]) for _ in range(2))
    patched(model, strategy=strategy)
    _, want = reference_gradients(plain)
    loss_of(model, batch_of(dist.get_rank())).backward()
    average_dense_gradients(model)
    good = []
    for name, parameter in model.named_parameters():
        error = (full(parameter.grad).double() - want[name].double()).norm() / want[name].double().norm()
        if error <= 1e-5:
            good.append(name)
    return good


def router_gradients(family: str, strategy: str) -> None:
    """The routers' gradients are those of each of Transformers' implementations, which agree with each other."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 24, "intermediate_size": 24, **EIGHT[family]}
    expected: dict[str, torch.Tensor] = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        plain, model = (tiny_model(family, **sizes) for _ in range(2))
        for which in (plain, model):
            which.set_experts_implementation(implementation)
        patched(model, strategy=strategy)
        _, want = reference_gradients(plain)
        loss_of(model, batch_of(dist.get_rank())).backward()
        compare_gradients(model, want)
        routers = {name: grad for name, grad in want.items() if "router." in name or ".gate." in name}
        assert routers
        assert all(grad.any() for grad in routers.values())
        for name, grad in routers.items():
            assert_close(grad, expected.setdefault(name, grad), f"{name} under {implementation}")


# B16, B17: factors


def factors(strategy: str, mesh: tuple[int, ...], group_size: int | None, experts: int) -> dict[str, float]:
    """How many times the unpatched one is each expert gradient, weight step and moment: 1 if it is averaged once.

    Args:
        strategy: The strategy.
        mesh: Its shape, ``(shard,)`` or ``(replicate, shard)``.
        group_size: Token groups.
        experts: E; where there are more ranks, some own nothing.
    """
    sizes = {"num_experts": experts, "num_experts_per_tok": min(2, experts), "num_hidden_layers": 1}
    want = expected("qwen3_moe", 0, sizes).gradients
    model = tiny_model("qwen3_moe", **sizes)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = LaerConfig(strategy=strategy, group_size=group_size, min_tokens_per_gemm=1, imbalance_threshold=1.0)
    patch_model(model, config, mesh=_mesh(mesh))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loss_of(model, batch_of(dist.get_rank())).backward()
    average_dense_gradients(model)
    # In this order: what SGD did is read off the weights.
    sgd.step()
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            found[name] = ratio(full(parameter.grad), want[name])
            found[f"{name} step"] = ratio(before[name].double() - full(parameter.data).double(), 0.5 * want[name])
    adamw.step()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            state = adamw.state[parameter]
            found[f"{name} first moment"] = ratio(full(state["exp_avg"]), 0.1 * want[name])
            found[f"{name} second moment"] = ratio(full(state["exp_avg_sq"]), 0.001 * want[name].square())
    return found


def ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    """The factor by which ``got`` is a multiple of ``want``."""
    got, want = got.double().flatten(), want.double().flatten()
    return float(got @ want / (want @ want))


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Made once: each costs process groups."""
    if shape not in _MESHES:
        names = ("replicate", "shard")[-len(shape) :] if len(shape) > 1 else None
        _MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[shape]


def all_factors(settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """:func:`factors` of many settings."""
    return [(setting, factors(**setting)) for setting in settings]


# B20


def down_bias() -> torch.Tensor:
    """A gpt-oss block whose experts give their down bias only, all ones; then random biases against the unpatched."""
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 4}
    plain, model = (tiny_model("gpt_oss", **sizes) for _ in range(2))
    for which in (plain, model):
        block = which.model.layers[0].mlp.experts
        for parameter in (block.gate_up_proj, block.gate_up_proj_bias):
            parameter.data.zero_()
        block.down_proj_bias.data.fill_(1.0)
        nn.init.normal_(which.model.layers[1].mlp.experts.down_proj_bias, generator=torch.Generator().manual_seed(1))
    patched(model, strategy="llep")
    rank = dist.get_rank()
    hidden = torch.randn(2, 3 + rank, 34, generator=torch.Generator().manual_seed(rank))
    want, got = (which.model.layers[1].mlp(hidden)[0] for which in (plain, model))
    assert_close(got.detach(), want.detach(), "block with random biases")
    return model.model.layers[0].mlp(hidden)[0].detach()


# B23, B24, B26


def captured(model: nn.Module) -> list[Run]:
    """The runs of all layers from now on."""
    engine, runs = get_engine(model), []
    assert engine is not None
    plan = engine.plan

    def keep(*args: Any) -> Run:
        runs.append(plan(*args))
        return runs[-1]

    engine.plan = keep  # type: ignore[method-assign]
    return runs


def both_experts_on_one_rank(strategy: str) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """All tokens choose two experts of rank 1.

    Returns:
        Rows and choices sent to each rank, and the shapes that this rank's exchange of tokens moved forward.
    """
    plain, model = (tiny_model("qwen3_moe", num_experts=8) for _ in range(2))
    patched(model, strategy=strategy)
    runs, shapes = captured(model), _sent_shapes(model)
    rank = dist.get_rank()
    hidden = [torch.randn(5 + 2 * r, 34, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    weights = [torch.rand(len(h), 2, generator=torch.Generator().manual_seed(len(h))) for h in hidden]
    index = [torch.tensor([[6, 7]]).expand(len(h), 2) for h in hidden]
    block, want_block = (which.model.layers[0].mlp.experts for which in (model, plain))
    want = [block_results(want_block, h, i, w) for h, i, w in zip(hidden, index, weights, strict=True)]
    got = block_results(block, hidden[rank], index[rank], weights[rank])
    for name, ours, theirs in zip(("out", "hidden", "weights"), got, want[rank], strict=True):
        assert_close(ours, theirs, name)
    for name, parameter in block.named_parameters():
        assert_close(full(parameter.grad), want_block.get_parameter(name).grad / 2, name)
    return runs[0].routes.send_rows, runs[0].routes.send_choices, shapes


def _sent_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the hidden states given to the exchange of tokens."""
    engine = get_engine(model)
    assert engine is not None
    tokens_comm, shapes = engine.comms.tokens, []
    exchange = tokens_comm.start_all_to_all

    def watch(tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.ndim == 2 and tensor.shape[1] == 34:
            shapes.append(tuple(tensor.shape))
        return exchange(tensor, *args)

    tokens_comm.start_all_to_all = watch  # type: ignore[method-assign]
    return shapes


def rows_alone(family: str, strategy: str) -> None:
    """Row i of a batch is what it is alone, gradients add up; strides of the experts' input do not matter."""
    together, alone = (patched(tiny_model(family), strategy=strategy) for _ in range(2))
    ids = tokens(3, 5, seed=dist.get_rank())
    out = together(input_ids=ids, use_cache=False).logits
    out.sin().sum().backward()
    for row in range(3):
        single = alone(input_ids=ids[row : row + 1], use_cache=False).logits
        assert_close(single[0].detach(), out[row].detach(), f"row {row}")
        single.sin().sum().backward()
    for (name, ours), theirs in zip(together.named_parameters(), alone.parameters(), strict=True):
        assert_close(full(ours.grad), full(theirs.grad), name, 2e-5)
    _strides(together.model.layers[0].mlp.experts)


def _strides(block: nn.Module) -> None:
    """An odd number of tokens, the input transposed in memory, index and weights too."""
    generator = torch.Generator().manual_seed(7)
    hidden, weights = torch.randn(7, 34, generator=generator), torch.rand(7, 2, generator=generator)
    index = torch.rand(7, 7, generator=generator).topk(2).indices
    want = block_results(block, hidden, index, weights)
    got = block_results(block, *(tensor.t().contiguous().t() for tensor in (hidden, index, weights)))
    for name, ours, theirs in zip(("out", "hidden", "weights"), got, want, strict=True):
        assert torch.equal(ours, theirs), name


def blocks(strategy: str, sizes: list[tuple[int, int]]) -> None:
    """The MoE block's output and gradients for many (E, K), by the router's own choice."""
    rank = dist.get_rank()
    for experts, top_k in sizes:
        changes = {"num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": 1}
        plain, model = (tiny_model("qwen3_moe", **changes) for _ in range(2))
        patched(model, strategy=strategy)
        want, got = (_block_gradients(which, dist.get_world_size(), rank) for which in (plain, model))
        for name in got:
            if top_k == 1 and "gate." in name:  # a weight that is normalized by itself: rounding is all there is
                assert got[name].abs().max() <= 1e-5, name
            else:
                assert_close(got[name], want[name], f"{name} with E={experts}, K={top_k}")


def _block_gradients(model: nn.Module, world: int, rank: int) -> dict[str, torch.Tensor]:
    """Of the first layer's block: this rank's output, and the mean gradients over ranks."""
    block = model.model.layers[0].mlp
    sharded = get_engine(model) is not None
    outs = {}
    for source in [rank] if sharded else range(world):
        hidden = torch.randn(2, 4 + source, 34, generator=torch.Generator().manual_seed(source))
        outs[source] = block(hidden)
        (outs[source].sin().sum() / (1 if sharded else world)).backward()
    if sharded:
        average_dense_gradients(block)
    return {"out": outs[rank].detach()} | {name: full(p.grad) for name, p in block.named_parameters()}


# B29, B30


def logits_equal(family: str, strategy: str, changes: dict[str, Any]) -> list[str]:
    """Logits and gradients of a model with some dense layers; returns the names of the patched modules."""
    plain, model = (tiny_model(family, **changes) for _ in range(2))
    patched(model, strategy=strategy)
    ids = batch_of(dist.get_rank())
    with torch.no_grad():
        assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, "logits")
    _, want = reference_gradients(plain)
    loss_of(model, ids).backward()
    compare_gradients(model, want)
    engine = get_engine(model)
    assert engine is not None
    return list(engine.layers)


def sharded_and_gathered(folder: str, strategy: str) -> None:
    """gpt-oss: what was sharded gathers to the same bits; a step, then saved and loaded, has the unpatched logits."""
    plain, model = (tiny_model("gpt_oss", hidden_size=32, intermediate_size=24) for _ in range(2))
    patched(model, strategy=strategy)
    before = {name: full(value) for name, value in model.state_dict().items()}
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    _, want = reference_gradients(plain)
    for name, parameter in plain.named_parameters():
        parameter.grad = want[name]
    loss_of(model, batch_of(dist.get_rank())).backward()
    average_dense_gradients(model)
    for which in (plain, model):
        torch.optim.SGD(which.parameters(), lr=0.1, foreach=False).step()
    after = {name: full(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=after)
    dist.barrier()
    again = type(plain).from_pretrained(folder, experts_implementation="eager").train()
    ids = batch_of(0)
    with torch.no_grad():
        moved = _logits(plain, ids)
        assert_close(_logits(again, ids), moved, "logits after a step")
        assert not torch.allclose(moved, _logits(tiny_model("gpt_oss", hidden_size=32, intermediate_size=24), ids))


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits
