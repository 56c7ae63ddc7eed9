"""What rank processes run for LoRA on experts. Each case asserts for itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from tests.engine.cases import average_dense_gradients, batch_of, loss_of, movement, patched
from tests.integrations import rig
from tests.integrations.cases import Counts, counted
from tests.models import assert_close, full, tiny_model, tokens

STEPS = 5
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**settings: Any) -> LoraConfig:
    """LoRA on the experts and on one linear layer; its rank divides nothing and is not the number of experts."""
    defaults = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    return LoraConfig(**defaults | settings)


def adapted(family: str, config: LoraConfig | None = None, **changes: Any) -> PeftModel:
    """A small model with LoRA, whose B is random so that every factor has a gradient and an effect."""
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(family, **changes), config or lora())
    randomize(model)
    return model.train()


def adapted_in(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PeftModel:
    """The same with factors of the model's dtype, as FSDP2's mixed precision gathers them, and with given routes.

    A router of bf16 that chooses another expert than float32's is a larger error than all rounding, and random.
    """
    model = adapted(family, dtype=dtype, **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            module.register_forward_hook(_choose_by_place)
    return model


def _choose_by_place(router: nn.Module, arguments: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, index = out
    token = torch.arange(len(index))[:, None]
    index = (token % 3 * (token % 5) + torch.arange(index.shape[1])) % 7
    return logits, logits.softmax(-1).gather(1, index).to(weights.dtype), index


def randomize(model: nn.Module, adapter: str = "default", seed: int = 2) -> None:
    """Random values for every B of an adapter, which PEFT starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"lora_B.{adapter}" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@contextmanager
def without_peft_sums() -> Iterator[None]:
    """Inside, PEFT's way of forming weight and addition for the whole stack of experts raises; a router's may."""
    original = ParamWrapper.get_delta_weight

    def of_routers(wrapper: Any, adapter: str) -> torch.Tensor:
        assert wrapper.num_experts == 1, "an addition to the whole stack of experts was made"
        return original(wrapper, adapter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamWrapper, "get_delta_weight", of_routers)
        patch.setattr(ParamWrapper, "get_delta_factors", of_routers)
        yield


def equal_gradients(
    family: str, strategy: str, recompute: str | None = None, settings: dict[str, Any] | None = None
) -> Counts:
    """Loss and every gradient of two steps, against unpatched PEFT on all ranks' tokens."""
    model = adapted(family, lora(**settings or {}))
    patched(model, strategy=strategy, history=1, recompute=recompute or "layer")
    if recompute is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    for step in range(2):
        _compare_step(model, step, *_expected(family, step, json.dumps(settings or {})))
    return movement(model)


@lru_cache(maxsize=64)
def _expected(family: str, step: int, settings: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss under unpatched PEFT, and the mean gradients; computed once for all cases of this process."""
    plain = adapted(family, lora(**json.loads(settings)))
    losses = [loss_of(plain, batch_of(rank, step)) for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    gradients = {name: full(p.grad) for name, p in plain.named_parameters() if p.requires_grad}
    return [loss.item() for loss in losses], gradients


def _compare_step(model: nn.Module, step: int, losses: list[float], want: dict[str, torch.Tensor]) -> None:
    rank = dist.get_rank()
    model.zero_grad()
    with without_peft_sums():
        loss = loss_of(model, batch_of(rank, step))
        loss.backward()
    assert abs(loss.item() - losses[rank]) <= 1e-5 * abs(losses[rank])
    average_dense_gradients(model)
    got = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert want[name].abs().max() > 0, f"{name}: nothing to compare"
        assert_close(full(grad), want[name], name)


def run_lora(
    _: str, family: str, laer: dict[str, Any] | None = None, checkpointing: bool = False, **settings: Any
) -> dict[str, Any]:
    """AdamW steps of a plain loop under FSDP2, patched where ``laer`` is given."""
    run = trained(family, laer, checkpointing, **settings)
    return {**run.numbers, "weights": rig.gathered(run.model)}


def trained(
    family: str,
    laer: dict[str, Any] | None,
    checkpointing: bool,
    peft: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> rig.Loop:
    """The loop after its steps; ``settings`` are the loop's."""
    kind = rig.fsdp_plugin if laer is None else partial(rig.fsdp_plugin, LaerFSDPPlugin, laer=rig.eager(**laer))
    model = adapted(family, lora(**peft or {}), dtype=dtype)
    run = rig.Loop(family, kind(activation_checkpointing=checkpointing), model=model, **settings)
    run.train(STEPS)
    return run


def trains(
    family: str,
    checkpointing: bool = False,
    peft: dict[str, Any] | None = None,
    parallelism: tuple[int, int] | None = None,
    **laer: Any,
) -> Counts:
    """AdamW steps: losses, gradient norms and adapters are unpatched PEFT's."""
    theirs = rig.reference(run_lora, "", family, peft=peft, parallelism=parallelism)
    with rig.fresh_accelerate():
        run = trained(family, laer, checkpointing, peft, parallelism=parallelism)
        engine = get_engine(run.model)
        ours = {**run.numbers, "weights": rig.gathered(run.model)}
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain())


def trains_in_bf16(family: str, parallelism: tuple[int, int] | None = None, **laer: Any) -> Counts:
    """Mixed precision: dtypes are FSDP2's, and adapters stray from float32's no farther than unpatched PEFT's."""
    half = {"mixed_precision": "bf16", "dtype": torch.bfloat16, "parallelism": parallelism}
    exact = rig.reference(run_lora, "", family, parallelism=parallelism)
    theirs = rig.reference(run_lora, "", family, **half)
    with rig.fresh_accelerate():
        run = trained(family, laer, False, **half)
        engine = get_engine(run.model)
        ours = {**run.numbers, "weights": rig.gathered(run.model)}
    assert engine is not None
    assert engine.compute_dtype == torch.bfloat16
    factors = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    assert len(factors) == 2 * (2 + 1) * 2
    assert {p.dtype for p in factors.values()} == {torch.float32}
    strays = [
        sum(np.square(side["weights"][name] - exact["weights"][name]).sum() for name in factors) ** 0.5
        for side in (ours, theirs)
    ]
    assert 0 < strays[0] <= 1.5 * strays[1], strays
    # A loss of 4 in bf16 is known to 0.03.
    off = [np.abs(np.subtract(side["loss"], exact["loss"])).mean() for side in (ours, theirs)]
    assert off[0] <= 1.5 * off[1] + 0.03, off
    return counted(engine.recorder.drain())


def saved_and_merged(folder: str, family: str, parallelism: tuple[int, int] | None = None, **laer: Any) -> None:
    """What PEFT saves of a patched model is what unpatched PEFT loads, runs and merges."""
    ids = tokens(2, 9, seed=5)
    with rig.fresh_accelerate():
        run = trained(family, laer, False, {"r": 4, "use_rslora": True}, parallelism=parallelism)
        weights = rig.gathered(run.model)
        with torch.no_grad():
            want = run.model.eval()(input_ids=ids).logits
        state = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            run.model.save_pretrained(folder, state_dict=state)
        dist.barrier()
    plain = tiny_model(family).eval()
    with torch.no_grad():
        base = plain(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(plain, folder).eval()
        assert_close(loaded(input_ids=ids).logits, want, "loaded")
        adapters = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
        assert len(adapters) == 2 * (2 + 1) * 2, "two layers, two stacks and a linear layer, A and B"
        for name, parameter in adapters.items():
            np.testing.assert_array_equal(parameter.numpy(), weights[name], err_msg=name)
        assert_close(loaded.merge_and_unload()(input_ids=ids).logits, want, "merged")
    assert (want - base).norm() > 0.01 * base.norm(), "the adapter does nothing"


def frozen_and_trained(strategy: str) -> dict[str, tuple[int, int]]:
    """How many exchanges of expert weights a forward and a backward make, by what is trained."""
    made = {}
    for kind in ("experts' LoRA", "attention's LoRA", "frozen", "all"):
        model = _trained_part(kind)
        patched(model, strategy=strategy, history=1)
        engine = get_engine(model)
        assert engine is not None
        calls = _count_calls(engine.comms.weights, "start_all_to_all")
        loss = loss_of(model, batch_of(dist.get_rank()))
        forward = len(calls)
        loss.backward()
        made[kind] = forward, len(calls) - forward
    return made


def _trained_part(kind: str) -> nn.Module:
    if kind == "experts' LoRA":
        return adapted("gpt_oss")
    if kind == "attention's LoRA":
        return adapted("gpt_oss", lora(target_parameters=None))
    model = tiny_model("gpt_oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kind == "all" or "experts" not in name)
    return model


def _count_calls(owner: Any, name: str) -> list[str]:
    """A list that grows with every call of a method from here on."""
    original, calls = getattr(owner, name), []

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return original(*arguments, **keywords)

    setattr(owner, name, counting)
    return calls
