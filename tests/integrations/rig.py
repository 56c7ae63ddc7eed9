"""What the rank processes of these tests run: small models, small data, one training run, its numbers.

Run in a rank process with a gloo process group. Sizes are such that nothing divides anything.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_laer.config import LaerConfig
from hf_laer.integrations.accelerate import enable_cpu_fsdp
from tests.models import tiny_model

VOCABULARY = 67


def eager(**settings: Any) -> LaerConfig:
    """A config under which even a tiny batch spills and moves experts."""
    return LaerConfig(**{"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0, **settings})


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w3`` ... to numbers."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def rows_of_tokens(count: int, seed: int = 0) -> Dataset:
    """Rows of unequal length, so that ranks and micro-batches have unequal tokens."""
    rng = random.Random(seed)
    lengths = [rng.randint(4, 20) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randint(3, VOCABULARY - 1) for _ in range(n)] for n in lengths]})


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate as in a new process of a launcher, for one case; its variables are put back afterwards."""
    before = dict(os.environ)
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}.items():
        os.environ[name] = str(value)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def gathered(model: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter in full, under the names of the bare model."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        full[name.replace("_checkpoint_wrapped_module.", "")] = value.detach().float().numpy().copy()
    return full


def sft(folder: str, **settings: Any) -> SFTConfig:
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
        "lr_scheduler_type": "constant",
        "max_length": 32,
        "optim": "adamw_torch",
        "bf16": False,
        "seed": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    return SFTConfig(folder, use_cpu=True, fsdp=True, fsdp_config=fsdp, disable_tqdm=True, **chosen | settings)


def run_sft(
    folder: str,
    family: str,
    callbacks: Sequence[Any] = (),
    *,
    before: Callable[[nn.Module], Any] = lambda model: None,
    resume: str | None = None,
    rows: int = 48,
    peft: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains with TRL's ``SFTTrainer``.

    Returns:
        ``logs`` (the trainer's history), ``weights`` (after training, in full) and ``trainer``.
    """
    enable_cpu_fsdp()
    set_seed(0)
    model = tiny_model(family)
    before(model)
    trainer = SFTTrainer(
        model=model,
        args=sft(folder, **settings),
        train_dataset=rows_of_tokens(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {"logs": trainer.state.log_history, "weights": gathered(trainer.model), "trainer": trainer}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses, gradient norms and weights of two runs agree."""
    for key in ("loss", "grad_norm"):
        mine, others = (np.array([log[key] for log in run["logs"] if "loss" in log]) for run in (ours, theirs))
        np.testing.assert_allclose(mine, others, rtol=tolerance, err_msg=key)
    far = {name: error for name, error in distances(ours["weights"], theirs["weights"]).items() if error > tolerance}
    assert not far, f"weights differ: {far}"


def distances(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative distance of each tensor; the names must agree."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {
        name: float(np.linalg.norm(ours[name] - theirs[name]) / max(np.linalg.norm(theirs[name]), 1e-12))
        for name in theirs
    }
