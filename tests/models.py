"""Small models of each family, made on the spot, with sizes that divide nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHARED: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MLP = {"moe_intermediate_size": 25, "intermediate_size": 50, "num_experts_per_tok": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 25, "num_local_experts": 7, "num_experts_per_tok": 2, "num_attention_heads": 1},
    "qwen2_moe": {
        **_MLP,
        "num_attention_heads": 1,
        "num_experts": 7,
        "shared_expert_intermediate_size": 21,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {**_MLP, "num_experts": 7, "norm_topk_prob": True},
    "gpt_oss": {"intermediate_size": 25, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 8},
    "olmoe": {"intermediate_size": 25, "num_experts": 7, "num_experts_per_tok": 3, "num_attention_heads": 1},
    "qwen3_next": {
        **_MLP,
        "num_experts": 7,
        "shared_expert_intermediate_size": 21,
        "layer_types": ["full_attention", "full_attention"],
    },
    "deepseek_v3": {
        **_MLP,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        "num_key_value_heads": 2,
    },
}
FAMILIES = tuple(_FAMILIES)
_OWN_HEAD_DIM = ("qwen3_moe", "gpt_oss", "qwen3_next")


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of the family with random weights; biases too, and routers that prefer some experts."""
    settings = {**_SHARED, **_FAMILIES[family], **changes}
    if family not in _OWN_HEAD_DIM:
        settings.pop("head_dim")
    settings.setdefault("eos_token_id", 1)
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if _is_router(name) else 0.05))
    return model.train()


def tokens(rows: int, length: int, *, seed: int = 0, vocabulary: int = 67) -> torch.Tensor:
    """int64 ``[rows, length]`` random ids."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed), device="cpu")


@contextmanager
def repeatable() -> Iterator[None]:
    """Runs that can be repeated bit by bit; each layout is waited for."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient as a full tensor. Collective where parameters are sharded."""
    return {name: full(parameter.grad) for name, parameter in model.named_parameters() if parameter.requires_grad}


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """A plain copy of a tensor that may be a DTensor."""
    assert tensor is not None, "a trained parameter has no gradient"
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    """The norm of the difference is at most ``tolerance`` times that of ``want``; exact zeros stay zero."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    norm = want.double().norm()
    error = (got.double() - want.double()).norm()
    assert error <= tolerance * norm, f"{what}: relative error {error / norm:.2e} (norm {norm:.2e})"


def _is_router(name: str) -> bool:
    return name.endswith(("gate.weight", "router.weight"))


def settings_of(strategy: str) -> dict[str, str]:
    """Of a strategy's name in tests: ``fsep+llep:whole`` says where experts live."""
    name, _, homes = strategy.partition(":")
    return {"strategy": name, "expert_homes": homes} if homes else {"strategy": name}
