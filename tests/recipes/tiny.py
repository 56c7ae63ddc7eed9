"""Tiny dense models and a tokenizer made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def dense(family: str, **changes: Any) -> PreTrainedModel:
    """A random dense model whose logits are large enough to compare."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **changes}, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with SmolLM2's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = TEMPLATE
    return made


def checkpoint(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A saved tiny dense model with its tokenizer."""
    model = dense(family, **changes)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
