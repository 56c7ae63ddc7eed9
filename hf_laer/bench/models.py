"""What ``hf-laer bench sft`` trains, and who: configurations of well-known models, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_laer.config import AUTO, FIXED_HOMES, FSDP2, HOMES, STRATEGIES, UNION

NATIVE = "native_ep"
# What all others share: the step without its experts, whose parameters are stepped all the same.
REST = "no_experts"
# Strategies, and the one that has a choice with each place where experts may live.
OURS = (*STRATEGIES, *(f"{UNION}:{homes}" for homes in HOMES))
CONTENDERS = (*OURS, AUTO, FSDP2, NATIVE, REST)
_QWEN3: dict[str, Any] = {
    "family": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3,
    # 0.93 B parameters in 8 layers: so small that the host is most of it.
    "qwen3-1b": {
        **_QWEN3,
        "vocab_size": 49152,
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
    },
    "mixtral-8x7b": {
        "family": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "family": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    # To see that everything runs, on CPUs too.
    "tiny": {
        **_QWEN3,
        "vocab_size": 67,
        "hidden_size": 36,
        "moe_intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    },
    "tiny-gpt-oss": {
        "family": "gpt_oss",
        "vocab_size": 67,
        "hidden_size": 36,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Job:
    """What all contenders train.

    Args:
        model: One of ``MODELS``.
        layers: Decoder layers.
        rows: Sequences per rank and step.
        length: Tokens per sequence.
        steps: Timed steps; three more come first.
        checkpointing: Activation checkpointing, for all contenders.
        attention: Transformers' attention implementation; ``None`` leaves the choice to the model.
        laer: Settings of ``LaerConfig`` beside the strategy.
        reshard: FSDP's ``reshard_after_forward``, of all contenders but Transformers' own.
    """

    model: str
    layers: int
    rows: int
    length: int
    steps: int
    checkpointing: bool
    attention: str | None
    laer: dict[str, Any]
    reshard: bool = True


def asked(name: str) -> tuple[str, str | None]:
    """The strategy of a contender in ``OURS``, and where its experts live if that is given."""
    strategy, _, homes = name.partition(":")
    return strategy, homes or FIXED_HOMES.get(strategy)
