"""What rank processes run for the tests of the TRL callback. Each case asserts for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_laer.integrations.accelerate import hook
from hf_laer.integrations.trl import LaerCallback
from tests.integrations import cases, rig, rig_trl
from tests.models import repeatable


def trains(folder: str, family: str, strategy: str, **settings: Any) -> cases.Counts:
    """AdamW steps of TRL SFT (ten by default), patched and not: loss, gradient norm and weights are the same."""
    plain = {key: value for key, value in settings.items() if "checkpointing" not in key}
    theirs = rig.reference(rig_trl.run_sft, folder, family, **plain)
    callback = LaerCallback(rig.eager(strategy=strategy))
    with rig.fresh_accelerate():
        ours = rig_trl.run_sft(folder, family, [callback], **settings)
    rig.assert_same(ours, theirs)
    counts = cases.counted(callback.records)
    for key in ("spilled", "moved"):
        assert sum(log[f"laer/{key}"] for log in ours["logs"]) == counts[key]
    return counts


def evaluates(folder: str, strategy: str, **settings: Any) -> cases.Counts:
    """Evaluation during training: the same losses, and nothing recorded of it."""
    return trains(folder, "qwen3_moe", strategy, eval_strategy="steps", eval_steps=2, **settings)


def head_in_root_unit(folder: str, tied: bool) -> cases.Counts:
    """The cure for torch before 2.13, on any torch: norm and head in FSDP2's root unit, the same losses.

    Evaluation and a checkpoint in mid-training are what fails without it there.
    """
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "sizes": {"tie_word_embeddings": tied}}
    cured = hook._one_tail
    hook._one_tail = hook._tail_in_root
    callback = LaerCallback(rig.eager(strategy="llep"))
    try:
        with rig.fresh_accelerate():
            saving = {"save_strategy": "steps", "save_steps": 2}
            trainer = rig_trl.sft_trainer(folder, "qwen3_moe", [callback], **settings, **saving)
            trainer.train()
    finally:
        hook._one_tail = cured
    units = {name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)}
    assert not units & ({"model.norm", "lm_head"} | ({"model.embed_tokens"} if tied else set()))
    assert "model.layers.1" in units
    ours = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    if Version(torch.__version__).release >= (2, 13):
        theirs = rig.reference(rig_trl.run_sft, folder, "qwen3_moe", **settings)
        np.testing.assert_allclose(ours, theirs["eval_loss"], rtol=1e-5)
    return cases.counted(callback.records)


def trains_twice_and_saves(folder: str, strategy: str) -> None:
    """A second ``train()`` goes on as unpatched; ``save_model`` writes what a bare ``from_pretrained`` reads."""
    runs = []
    for callbacks in ([], [LaerCallback(rig.eager(strategy=strategy))]):
        with rig.fresh_accelerate():
            trainer = rig_trl.sft_trainer(folder, "qwen3_moe", callbacks, max_steps=2)
            trainer.train()
            trainer.train()
            evaluated = trainer.evaluate()
            trainer.save_model(f"{folder}/final")
            history = [log for log in trainer.state.log_history if "loss" in log]
            columns = {key: [log[key] for log in history] for key in ("loss", "grad_norm")}
            columns["eval_loss"] = [evaluated["eval_loss"]]
            runs.append({**columns, "weights": rig.gathered(trainer.model)})
    rig.assert_same(runs[1], runs[0])
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/final", experts_implementation="eager")
    for name, parameter in saved.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), runs[1]["weights"][name], err_msg=name)
    dist.barrier()


def trains_lora(folder: str, strategy: str, **settings: Any) -> cases.Counts:
    """LoRA on attention, experts frozen: the same adapters as unpatched."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return trains(folder, "qwen3_moe", strategy, peft=lora, **settings)


def resumed(folder: str, strategy: str, kind: str) -> cases.Counts:
    """Six steps in one go, and three resumed from the third's checkpoint: the same, placements too."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    settings["fsdp_config"] = {"state_dict_type": kind}
    runs, records = [], []
    for resume in (None, f"{folder}/checkpoint-3"):
        callback = LaerCallback(rig.eager(strategy=strategy, history=3))
        with rig.fresh_accelerate(), repeatable():
            runs.append(rig_trl.run_sft(folder, "qwen3_moe", [callback], resume, **settings))
        records.append(list(callback.records))
    rig.assert_same(runs[1], runs[0])
    cases.assert_same_records(records[1], records[0][len(records[0]) // 2 :])
    return cases.counted(records[1])


def refused_by_trainer(folder: str) -> None:
    """Callbacks added late, reentrant checkpointing, DDP: refused before the first step."""
    with rig.fresh_accelerate():
        trainer = rig_trl.sft_trainer(folder, "qwen3_moe")
        trainer.add_callback(LaerCallback())
        with pytest.raises(ValueError, match="added after the trainer was made"):
            trainer.train()
    with rig.fresh_accelerate():
        kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        with pytest.raises(ValueError, match="use_reentrant"):
            rig_trl.sft_trainer(folder, "qwen3_moe", [LaerCallback()], **kwargs)
    with rig.fresh_accelerate(), pytest.raises(ValueError, match="distributed_type is MULTI_CPU"):
        rig_trl.sft_trainer(folder, "qwen3_moe", [LaerCallback()], fsdp=False)


def unequal_streams(folder: str) -> None:
    """An iterable data set whose shards go to ranks is refused when training begins."""
    stream = rig_trl.rows_of_tokens(10).to_iterable_dataset(num_shards=2)
    with rig.fresh_accelerate():
        trainer = rig_trl.sft_trainer(folder, "qwen3_moe", [LaerCallback()], dataset=stream)
        with pytest.raises(ValueError, match="iterable data set"):
            trainer.train()


class Reporter(TrainerCallback):
    """Stands for TensorBoard: it comes before a user's callbacks and keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def reported(folder: str) -> list[dict[str, float]]:
    """Reporters before the callback in the list see its numbers; there are few of them.

    Returns:
        Each log's, but for host times.
    """
    reporter = Reporter()
    with rig.fresh_accelerate():
        callbacks = [reporter, LaerCallback(rig.eager(strategy="fsep"))]
        rig_trl.run_sft(folder, "qwen3_moe", callbacks, max_steps=2)
    ours = [{key for key in seen if key.startswith("laer/")} for seen in reporter.seen]
    kinds = ("imbalance_before", "imbalance_after", "imbalance_before_max", "imbalance_after_max")
    others = ("spilled", "moved", "plan_ms", "expert_imbalance", "experts_active")
    assert ours[0] == ours[1] == {f"laer/{key}" for key in (*kinds, *others)}
    assert not ours[2], "the summary has none"
    return [{key: seen[key] for key in keys - {"laer/plan_ms"}} for seen, keys in zip(reporter.seen, ours, strict=True)]
