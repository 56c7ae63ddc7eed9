"""Cases about experts that move between ranks, and about what must not notice it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_laer.engine import Engine
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan.types import Placement
from hf_laer.tuner import version_of
from tests.engine.cases import (
    average_dense_gradients,
    batch_of,
    compare_gradients,
    loss_of,
    patched,
    reference_gradients,
)
from tests.models import assert_close, full, repeatable, tiny_model, tokens
from tests.reports.steered import Steered

NEVER = 10**6


def engine_of(model: nn.Module) -> Engine:
    """The model's engine."""
    engine = get_engine(model)
    assert engine is not None
    return engine


def place(model: nn.Module, slots: list[list[int]]) -> None:
    """Puts experts where a case wants them, in every layer; with a long ``relayout_interval`` they stay."""
    engine = engine_of(model)
    for layer in engine.layers.values():
        tuner = engine.tuner_of(layer)
        tuner._current = version_of(0, [Placement(np.array(slots, np.int64))])


def layouts_of(model: nn.Module) -> list[Any]:
    """Each layer's newest layout, waited for."""
    engine = engine_of(model)
    if engine.config.strategy == "llep":
        return []
    versions = [engine.tuner_of(layer)._newest(wait=True) for layer in engine.layers.values()]
    return [[placement.slots.tolist() for placement in version.placements] for version in versions]


def plans_of(model: nn.Module) -> list[tuple[str, str]]:
    """A list that fills with each plan's layer and digest as they are made."""
    engine, made = engine_of(model), []
    make = engine._plans

    def recorded(*args: Any) -> Any:
        plans = make(*args)
        made.extend((engine.watch.where.layer, plan.digest()) for plan in plans)
        return plans

    engine._plans = recorded
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that does not blow up the rounding of tiny gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def _copies_agree(model: nn.Module, experts: int) -> None:
    """Expert 0, unsharded on every rank, is bit by bit the parameter's."""
    engine = engine_of(model)
    ranks = dist.get_world_size()
    for layer in engine.layers.values():
        want = layer.want(((0,),) * ranks, torch.float32, torch.device("cpu"), engine.era())
        slots = engine.unsharder.finish(engine.unsharder.begin(want, engine.comms.weights))
        for name, stacks in slots.items():
            copy = next(stack for stack in reversed(stacks) if len(stack))
            whole = full(layer.module.get_parameter(name).data)
            assert whole.shape[0] == experts
            assert torch.equal(copy[0], whole[0]), name


def replicated(strategy: str, experts: int, slots: list[list[int]] | None) -> dict[str, Any]:
    """B19: five SGD steps with expert 0 on all ranks, or more ranks than experts; weights as unpatched."""
    plain, model = (tiny_model("qwen3_moe", num_experts=experts) for _ in range(2))
    patched(model, strategy=strategy, slots_per_rank=3 if slots else None, relayout_interval=NEVER)
    if slots:
        place(model, slots)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, foreach=False) for m in (plain, model)]
    for step in range(5):
        _, want = reference_gradients(plain, step)
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        average_dense_gradients(model)
        for name, parameter in plain.named_parameters():
            parameter.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()
        _copies_agree(model, experts)
    for (name, got), want_of in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(got.data), want_of.data, name)
    record = engine_of(model).recorder.drain()[-1]
    return {"loads": record.loads_after.tolist(), "expert": record.expert_loads.tolist()}


def pooled(strategy: str, checkpointing: str) -> dict[str, int]:
    """B36: a hot expert that is spilled in each of three layers; returns the pool's bytes, and with six layers."""
    held = {}
    for layers in (3, 6):
        sizes = {"num_hidden_layers": layers}
        plain, model = tiny_model("qwen3_moe", **sizes), tiny_model("qwen3_moe", **sizes)
        recompute = checkpointing or "layer"
        # With room for as many on either rank, whatever the layout.
        patched(model, strategy=strategy, recompute=recompute, history=1, slots_per_rank=5)
        if checkpointing:
            model.gradient_checkpointing_enable()
        want_of, _ = Steered(plain, [(0, 1, 0, 2)]), Steered(model, [(0, 1, 0, 2)])
        for step in range(2 if layers == 3 else 1):
            want = want_of.gradients(step)
            model.zero_grad()
            loss_of(model, batch_of(dist.get_rank(), step)).backward()
            compare_gradients(model, want)
        engine = engine_of(model)
        records = engine.recorder.drain()
        assert {record.layer for record in records} == set(engine.layers)
        assert all((record.spilled > 0) == (strategy == "llep") for record in records), records
        held[f"{layers} layers"] = engine.pool.nbytes
        sizes_of = {name: p.numel() // p.shape[0] for name, p in layer_parameters(engine).items()}
        held["of all experts"] = 4 * sum(sizes_of.values()) * 7
    return held


def layer_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """The parameters of one layer."""
    layer = next(iter(engine.layers.values()))
    return {name: layer.module.get_parameter(name) for name in layer.homes}


BEFORE = [[0, 1, 2, 3, -1], [4, 5, 6, 7, -1]]
SWAPPED = [[7, 1, 2, 3, -1], [4, 5, 6, 0, -1]]
CYCLED = [[1, 7, 2, 3, -1], [4, 5, 6, 0, 1]]


def moved(accumulation: int) -> None:
    """B37: experts swapped and cycled between steps, or within one step's micro-batches; AdamW as if they stayed."""
    runs = []
    for layouts in ((BEFORE, BEFORE, BEFORE), (BEFORE, SWAPPED, CYCLED)):
        model = tiny_model("qwen3_moe", num_experts=8)
        patched(model, strategy="fsep", slots_per_rank=5, relayout_interval=NEVER)
        optimizer, plans = adamw(model), plans_of(model)
        for micro in range(6 * accumulation):
            step, last = divmod(micro, accumulation)
            place(model, layouts[micro % 3] if accumulation > 1 else layouts[step // 3 + step // 5])
            loss_of(model, batch_of(dist.get_rank(), micro)).backward()
            if last == accumulation - 1:
                average_dense_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        state = {"plans": plans}
        for name, parameter in model.named_parameters():
            state[name] = full(parameter.data)
            for key, value in optimizer.state[parameter].items():
                state[f"{key} of {name}"] = full(value)
        runs.append(state)
    stayed, went = runs
    assert stayed.pop("plans") != went.pop("plans")
    for name, want in stayed.items():
        assert_close(went[name], want, name)


def every_way(strategy: str) -> None:
    """B38: after a re-layout, each way to run the model gives the unpatched model's logits."""
    rank = dist.get_rank()
    plain, model = (tiny_model("qwen3_moe", num_experts=8) for _ in range(2))
    patched(model, strategy=strategy, slots_per_rank=4 + strategy.endswith("whole"), history=1)
    for which in (plain, model):
        Steered(which, [(0, 1, 0, 2), (0, 3, 1, 0)])
    first = layouts_of(model)
    for step in range(2):
        loss_of(model, batch_of(rank, step)).backward()
    assert (layouts_of(model) != first) == (strategy != "llep")
    ids = batch_of(rank, 9)
    with torch.no_grad():
        want = plain(input_ids=ids, use_cache=False).logits

    def same(got: torch.Tensor, what: str) -> None:
        assert_close(got.detach(), want, what)

    same(model(input_ids=ids, use_cache=False).logits, "training")
    model.eval()
    same(model(input_ids=ids, use_cache=False).logits, "evaluation")
    with torch.no_grad():
        same(model(input_ids=ids, use_cache=False).logits, "no_grad")
    with torch.inference_mode():
        same(model(input_ids=ids, use_cache=False).logits, "inference_mode")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        same(compiled(input_ids=ids, use_cache=False).logits, "compiled")
    prompt = tokens(2, 5, seed=rank)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), plain.eval().generate(prompt, **settings))
    model.train()
    model.gradient_checkpointing_enable()
    model.zero_grad()
    _, gradients = _steered_reference(plain.train(), 9)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    same(out.logits, "checkpointing")
    out.loss.backward()
    compare_gradients(model, gradients)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    same(adapted(input_ids=ids, use_cache=False).logits, "PEFT")


def _steered_reference(plain: nn.Module, step: int) -> tuple[None, dict[str, torch.Tensor]]:
    """Gradients by the unpatched model, which routes as its hooks say."""
    steered = next(hook.__self__ for hook in plain.model.layers[0].mlp.experts._forward_pre_hooks.values())
    return None, steered.gradients(step)


@repeatable()
def evaluated(strategy: str, evaluations: int) -> dict[str, Any]:
    """B49: three steps, evaluations of skewed data, three more; returns what the engine remembers."""
    model = patched(tiny_model("qwen3_moe"), strategy=strategy, history=3)
    made, rank = plans_of(model), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    kept: list[tuple[str, str]] = []
    for step in range(6):
        if step == 3:
            model.eval()
            with torch.no_grad():
                for _ in range(evaluations):
                    model(input_ids=torch.full((5, 9), 3 + rank), use_cache=False)
            model.train()
        del made[:]
        loss_of(model, batch_of(rank, step)).backward()
        average_dense_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        kept += made
    weights = {name: full(parameter.data).numpy() for name, parameter in model.named_parameters()}
    engine = engine_of(model)
    return {
        "memory": engine.state_dict(),
        "plans": kept,
        "weights": weights,
        "records": len(engine.recorder.drain()),
    }


@repeatable()
def recomputed(strategy: str, accumulation: int, recompute: str) -> dict[str, Any]:
    """B50: what the engine counts and plans in two steps, with and without activation checkpointing."""
    model = tiny_model("qwen3_moe")
    patched(model, strategy=strategy, history=3, recompute=recompute or "layer")
    if recompute:
        with pytest.raises(ValueError, match="use_reentrant"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made = plans_of(model)
    for micro in range(2 * accumulation):
        loss_of(model, batch_of(dist.get_rank(), micro)).backward()
        if micro % accumulation == accumulation - 1:
            model.zero_grad()
    engine = engine_of(model)
    rerouted = sum(layer.rerouted for layer in engine.layers.values())
    records = engine.recorder.drain()
    loads = np.sum([record.expert_loads for record in records], 0).tolist()
    return {"memory": engine.state_dict(), "plans": made, "rerouted": rerouted, "loads": loads}
