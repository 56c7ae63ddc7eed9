"""What rank processes run for the reports on adapters and on what trainers feed them. Each case asserts for itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from trl import SFTTrainer

from hf_laer import patch_model
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.transformers.experts import mark_of
from hf_laer.integrations.trl import LaerCallback
from tests.engine.cases import average_dense_gradients, batch_of, loss_of, patched
from tests.integrations import rig, rig_trl
from tests.integrations.cases import Counts, counted
from tests.integrations.cases_lora import EXPERTS, adapted, lora, randomize
from tests.models import assert_close, tiny_model

SAMPLES = 16


def trained_by_trl(folder: str, strategy: str) -> Counts:
    """B90. LoRA on attention, experts and router under TRL, each rank with a seed of its own: one set of adapters."""
    theirs = _sft(f"{folder}/plain", [])
    callback = LaerCallback(rig.eager(strategy=strategy))
    seen: list[torch.Tensor] = []
    with rig.fresh_accelerate():
        trainer = _trainer(f"{folder}/ours", [callback])
        _watch_factors(trainer.model, seen)
        ours = _train(trainer)
        trainer.save_model(f"{folder}/adapter")
        _refuses_late_adapters(trainer)
    rig.assert_same(ours, theirs)
    assert len(seen) == 2 * 2 * 2 * 4, "two steps of two micro-batches, two layers, two stacks of two factors"
    for factor in seen:
        everyone = [torch.empty_like(factor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, factor)
        assert all(torch.equal(factor, other) for other in everyone)
    dist.barrier()
    loaded = PeftModel.from_pretrained(tiny_model("qwen3_moe"), f"{folder}/adapter")
    for name, parameter in loaded.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            np.testing.assert_array_equal(parameter.detach().numpy(), ours["weights"][name], err_msg=name)
    return counted(callback.records)


def _trainer(folder: str, callbacks: list[Any]) -> SFTTrainer:
    config = lora(modules_to_save=["gate"], target_modules=["q_proj", "v_proj"])
    return rig_trl.sft_trainer(folder, "qwen3_moe", callbacks, peft=config, max_steps=2)


def _train(trainer: SFTTrainer) -> dict[str, Any]:
    randomize(trainer.model)
    torch.manual_seed(100 + dist.get_rank())
    trainer.train()
    history = [log for log in trainer.state.log_history if "loss" in log]
    columns = {key: [log[key] for log in history] for key in ("loss", "grad_norm")}
    return columns | {"weights": rig.gathered(trainer.model)}


def _sft(folder: str, callbacks: list[Any]) -> dict[str, Any]:
    with rig.fresh_accelerate():
        return _train(_trainer(folder, callbacks))


def _watch_factors(model: nn.Module, seen: list[torch.Tensor]) -> None:
    """Keeps copies of the factors that the experts of this rank are run with."""

    def note(module: nn.Module, arguments: Any) -> None:
        found = mark_of(module)
        assert found is not None
        for adapters in found.adapters.values():
            for own in adapters:
                seen.extend(factor.detach().clone(memory_format=torch.contiguous_format) for factor in (own.a, own.b))

    engine = get_engine(model)
    assert engine is not None
    for layer in engine.layers.values():
        layer.module.register_forward_pre_hook(note)


def _refuses_late_adapters(trainer: SFTTrainer) -> None:
    """An adapter that comes after the model was sharded would be each rank's own: refused, wherever it is."""
    trainer.model.add_adapter("late", LoraConfig(target_modules=["k_proj"]))
    trainer.model.set_adapter("late")
    with pytest.raises(ValueError, match=r"k_proj.*not sharded"):
        trainer.train()
    trainer.model.add_adapter("later", lora())
    trainer.model.set_adapter("later")
    with pytest.raises(RuntimeError, match=r"'later' was added after accelerator\.prepare"):
        trainer.model(input_ids=batch_of(0))


def takes_effect(strategy: str) -> None:
    """B92. Logits are the merged model's, not the base model's; three steps move every adapter tensor."""
    ids = batch_of(dist.get_rank())
    with torch.no_grad():
        base = tiny_model("mixtral")(input_ids=ids).logits
        want = adapted("mixtral").merge_and_unload()(input_ids=ids).logits
    model = patched(adapted("mixtral"), strategy=strategy, history=1)
    with torch.no_grad():
        got = model(input_ids=ids).logits
    assert_close(got, want, "logits")
    assert (got - base).norm() > 0.05 * base.norm()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(before) == 2 * 3 * 2, "two layers, two stacks and a linear layer, two factors"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        average_dense_gradients(model)
        optimizer.step()
    for name, parameter in model.named_parameters():
        if name in before:
            assert (parameter - before[name]).abs().mean() > 1e-3, f"{name} did not move"


def several_adapters(strategy: str) -> None:
    """B94. A second adapter, both at once, none: the same logits as unpatched."""
    ids = batch_of(dist.get_rank())
    models = []
    for patch in (False, True):
        model = adapted("gpt_oss")
        model.add_adapter("ref", lora(r=5))
        randomize(model, "ref", seed=3)
        models.append(patched(model, strategy=strategy, history=1) if patch else model)
    plain, model = models
    logits = {}
    for active in ("default", "ref", ["default", "ref"]):
        for one in models:
            one.base_model.set_adapter(active)
        logits[str(active)] = _same_logits(model, plain, ids, str(active))
    with model.disable_adapter(), plain.disable_adapter():
        logits["none"] = _same_logits(model, plain, ids, "none")
    with torch.no_grad():
        assert_close(logits["none"], tiny_model("gpt_oss")(input_ids=ids).logits, "base")
    values = list(logits.values())
    assert all((a - b).norm() > 0.01 * a.norm() for i, a in enumerate(values) for b in values[:i])
    with pytest.raises(RuntimeError, match="load it onto the base model in one process"):
        model.merge_adapter()
    plain.merge_adapter()


def _same_logits(model: nn.Module, plain: nn.Module, ids: torch.Tensor, what: str) -> torch.Tensor:
    with torch.no_grad():
        got, want = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert_close(got, want, what)
    return got


def refused_as_upstream() -> dict[str, tuple[str, str]]:
    """B94. What PEFT refuses, patched and unpatched: the two messages by kind."""
    return {
        "dropout": _messages(lambda model: get_peft_model(model, lora(lora_dropout=0.05))),
        "dora": _messages(lambda model: get_peft_model(model, lora(use_dora=True))),
        "other targets": _messages(
            lambda model: get_peft_model(model, lora()).add_adapter("ref", lora(target_parameters=EXPERTS[:1]))
        ),
    }


def _messages(act: Callable[[nn.Module], Any]) -> tuple[str, str]:
    messages = []
    for patch in (False, True):
        model = tiny_model("qwen3_moe")
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are compared
            act(patch_model(model) if patch else model)
        messages.append(str(caught.value))
    return messages[0], messages[1]


def fed_by_trl(folder: str, packing: bool) -> list[dict[str, Any]]:
    """B95. An epoch of samples whose first token names them, loss on some tokens only: as unpatched, batch by batch.

    Returns:
        The micro-batches of this rank: ``samples``, ``labels`` that count, and ``items`` over all ranks.
    """
    runs = []
    for callbacks in ([], [LaerCallback(rig.eager(strategy="llep"))]):
        batches: list[dict[str, Any]] = []
        with rig.fresh_accelerate():
            trainer = _epoch(f"{folder}/{len(callbacks)}", callbacks, packing)
            _watch_batches(trainer, batches)
            trainer.train()
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            runs.append({"loss": losses, "weights": rig.gathered(trainer.model), "batches": batches})
    rig.assert_same(runs[1], runs[0])
    assert runs[1]["batches"] == runs[0]["batches"]
    return runs[1]["batches"]


def _epoch(folder: str, callbacks: list[Any], packing: bool) -> SFTTrainer:
    return rig_trl.sft_trainer(
        folder,
        "qwen3_moe",
        callbacks,
        dataset=named_samples(),
        dataset_kwargs=None,
        packing=packing,
        max_length=16,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=1 if packing else 2,
        gradient_accumulation_steps=1,
        average_tokens_across_devices=True,
        # Rows of the embedding that one sample uses have gradients so small that AdamW would blow their rounding up.
        adam_epsilon=1e-4,
    )


def named_samples() -> Dataset:
    """Sample i starts with the token 3 + i, which is nowhere else; two of them fill a row of 16; half is masked."""
    rng = random.Random(7)
    lengths = [length for i in range(SAMPLES // 2) for length in (4 + i % 5, 12 - i % 5)]
    rows = [[3 + i, *(rng.randint(20, 66) for _ in range(length - 1))] for i, length in enumerate(lengths)]
    masks = [[0, 0, *(rng.randint(0, 1) for _ in range(length - 3)), 1] for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "assistant_masks": masks})


def _watch_batches(trainer: SFTTrainer, batches: list[dict[str, Any]]) -> None:
    compute = trainer.compute_loss

    def watched(model: nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        ids, labels = inputs["input_ids"].flatten(), inputs["labels"].flatten()
        batches.append(
            {
                "samples": [int(token) - 3 for token in ids if 3 <= token < 3 + SAMPLES],
                "labels": [(int(i), int(token)) for i, token in zip(ids, labels, strict=True) if token != -100],
                "items": int(keywords["num_items_in_batch"]),
            }
        )
        return compute(model, inputs, *arguments, **keywords)

    trainer.compute_loss = watched
