"""From an experts module on Transformers' experts interface to the engine's :class:`ExpertsSpec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_laer.compute.gate import Gate, recognize
from hf_laer.compute.spec import ExpertsSpec

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")
ADAPTED = ("gate_up_proj", "up_proj", "down_proj")


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that are on the experts interface, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether Transformers' ``use_experts_implementation`` decorated the module's class."""
    # The module's own attributes are asked: PEFT's wrappers answer for the module inside them.
    return {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys() and hasattr(module, "num_experts")


def adapted_experts(model: nn.Module) -> dict[str, Any]:
    """PEFT's wrappers around the parameters of experts modules (one around the other), by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "ParamWrapper" and is_experts(module.get_base_layer())
    }


def spec_of(name: str, module: nn.Module) -> ExpertsSpec:
    """Reads a module's layout.

    Raises:
        ValueError: It has parameters, or a step after its second product, that the engine does not know.
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if module.has_bias else (None, None)
    known = {up, "down_proj", *(bias for bias in biases if bias)}
    found = {key for key, _ in module.named_parameters()}
    if found != known:
        raise ValueError(
            f"{name} ({type(module).__name__}) has the parameters {sorted(found)}, hf_laer knows {sorted(known)}: "
            "this family is not supported"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} ({type(module).__name__}) norms each expert's output: this family is not supported")
    down = module.get_parameter("down_proj")
    return ExpertsSpec(
        num_experts=down.shape[0],
        hidden_size=down.shape[2 if module.is_transposed else 1],
        is_transposed=bool(module.is_transposed),
        up=up,
        down="down_proj",
        up_bias=biases[0],
        down_bias=biases[1],
        gate=_gate(module),
        top_k=_top_k(module),
    )


def _top_k(module: nn.Module) -> int | None:
    """Experts per token, as the model's configuration has it."""
    config = getattr(module, "config", None)
    found = [getattr(config, name, None) for name in _TOP_K]
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _gate(module: nn.Module) -> Gate:
    """The module's gate, with the kernels' equivalent where it has one."""
    if not module.has_gate:
        return Gate(_late(module, "act_fn"))
    function = _late(module, "_apply_gate")
    return Gate(function, recognize(function, getattr(module, "alpha", 1.0), getattr(module, "limit", 0.0)))


def _late(module: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module's function, looked up at each call, so that a module changed later is followed."""
    return lambda rows: getattr(module, name)(rows)
