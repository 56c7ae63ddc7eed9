"""What the rank processes of the TRL tests run: small data, one trainer, its numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.integrations import rig
from tests.models import tiny_model

VOCABULARY = 67


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w3`` ... to numbers."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows_of_tokens(count: int, seed: int = 0) -> Dataset:
    """Rows of unequal length, so that ranks and micro-batches have unequal tokens."""
    rng = random.Random(seed)
    lengths = [rng.randint(4, 20) for _ in range(count)]
    rows = [[rng.randint(3, VOCABULARY - 1) for _ in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": rows})


def sft_arguments(folder: str, **settings: Any) -> SFTConfig:
    """Ten steps of two micro-batches of two rows, on CPUs under FSDP2."""
    fsdp = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": False}
    fsdp |= settings.pop("fsdp_config", {})
    chosen = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "learning_rate": 5e-3,
        "adam_epsilon": rig.EPSILON,
        "lr_scheduler_type": "constant",
        "max_length": 32,
        "optim": "adamw_torch",
        "bf16": False,
        "seed": 1,
        "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    sharded = {"fsdp": True, "fsdp_config": fsdp} if settings.pop("fsdp", True) else {}
    return SFTConfig(folder, use_cpu=True, **sharded, **chosen | settings)


def sft_trainer(
    folder: str,
    family: str,
    callbacks: Sequence[Any] = (),
    *,
    peft: Any = None,
    dataset: Any = None,
    sizes: dict[str, Any] | None = None,
    **settings: Any,
) -> SFTTrainer:
    """TRL's trainer over a small model."""
    set_seed(0)
    return SFTTrainer(
        model=tiny_model(family, **sizes or {}),
        args=sft_arguments(folder, **settings),
        train_dataset=rows_of_tokens(48) if dataset is None else dataset,
        eval_dataset=rows_of_tokens(7, seed=1),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft,
    )


def run_sft(
    folder: str, family: str, callbacks: Sequence[Any] = (), resume: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Trains; returns ``loss``, ``grad_norm`` (by step), ``logs`` and ``weights`` (in full)."""
    trainer = sft_trainer(folder, family, callbacks, **settings)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    columns = {key: [log[key] for log in history if key in log] for key in ("loss", "grad_norm", "eval_loss")}
    return columns | {
        "logs": [log for log in history if "loss" in log],
        "weights": rig.gathered(trainer.model),
    }
