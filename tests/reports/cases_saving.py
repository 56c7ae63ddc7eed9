"""What rank processes run for the reports on saving, loading and resuming. Each case asserts for itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import load_fsdp_model, save_fsdp_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer

from hf_laer import patch_model
from hf_laer.integrations.accelerate import LaerFSDPPlugin, save_state
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from tests.engine.cases_auto import choosing
from tests.integrations import rig, rig_trl
from tests.integrations.cases import counted
from tests.models import assert_close, tiny_model, tokens

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
ROWS = 8
STEPS = 2
# Of a run that is killed while it saves for the second time.
CUT = {"save_steps": 1, "max_steps": 3}
Numbers = dict[str, Any]


class Shared(rig.Loop):
    """A loop whose steps are the same on any number of ranks: each has its share of eight rows."""

    def batch(self, micro: int) -> torch.Tensor:
        share = ROWS // dist.get_world_size()
        return tokens(ROWS, 6, seed=micro)[dist.get_rank() * share :][:share]

    def _note(self, loss: torch.Tensor, norm: Any) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        super()._note(mean / dist.get_world_size(), norm)


def shared(strategy: str | None, kind: str = KINDS[1], **settings: Any) -> Shared:
    """The loop under a strategy, or unpatched; ``auto:fsep,llep`` is ``auto`` that chooses these, layer by layer."""
    if strategy is None:
        return Shared("qwen3_moe", rig.fsdp_plugin(state_dict_type=kind), **settings)
    name, _, chosen = strategy.partition(":") if strategy.startswith("auto") else (strategy, "", "")
    room = {"slots_per_rank": 4} if settings.get("parallelism") else {}
    plugin = rig.fsdp_plugin(LaerFSDPPlugin, state_dict_type=kind, laer=rig.eager(strategy=name, **room))
    if name != "auto":
        return Shared("qwen3_moe", plugin, **settings)
    wanted = chosen.split(",")
    with choosing(wanted):
        run = Shared("qwen3_moe", plugin, **settings)
    engine = get_engine(run.model)
    assert engine is not None
    alone = dist.get_world_size() == 1 and len(wanted) == 1
    found = [choice.strategy for choice in engine.choices.values()]
    assert list(engine.layers) == [name for name, choice in engine.choices.items() if choice.strategy != "fsdp2"]
    assert found == (["ep", "ep"] if alone else (2 * wanted)[:2]), found
    return run


def moments(run: rig.Loop) -> dict[str, np.ndarray]:
    """Every parameter's state in the optimizer, in full."""
    found = {}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = full.detach().numpy().copy()
    return found


def saves(folder: str, strategy: str | None, **settings: Any) -> Numbers:
    """Some steps, both kinds of state, as many more: their numbers, and ``moments`` as saved."""
    with rig.fresh_accelerate():
        run = shared(strategy, **settings)
        run.train(STEPS)
        kept = moments(run)
        for kind in KINDS:
            plugin = run.accelerator.state.fsdp_plugin
            plugin.state_dict_config = plugin.optim_state_dict_config = None
            plugin.set_state_dict_type(kind)
            save_state(run.accelerator, f"{folder}/{kind}")
        numbers = run.train(STEPS)
    assert not list(Path(folder).glob("*.part"))
    later = {key: numbers[key][STEPS:] for key in ("loss", "grad_norm")}
    return later | {"weights": numbers["weights"], "moments": kept}


def resumes(folder: str, ways: list[tuple[str | None, str]], wanted: Numbers, **settings: Any) -> None:
    """Loads each (strategy, kind): the moments are those that were saved, the next steps those of the whole run."""
    for strategy, kind in ways:
        with rig.fresh_accelerate():
            run = shared(strategy, kind, **settings)
            run.accelerator.load_state(f"{folder}/{kind}")
            run.micro = 2 * STEPS
            found = moments(run)
            ours = run.train(STEPS)
        assert found.keys() == wanted["moments"].keys()
        for name, value in wanted["moments"].items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{strategy} {kind} {name}")
        rig.assert_same(ours, wanted)


def trained_by_trainer(folder: str, kind: str, strategy: str | None, resume: str | None, **settings: Any) -> Numbers:
    """Four steps of four rows each, saved at the second; on any number of ranks.

    Rows are equally long and the auxiliary loss, which is a rank's own, is off: else losses depend on who has what.
    """
    rows = [[3 + (5 * row + 7 * at * at) % 64 for at in range(11)] for row in range(48)]
    callbacks = [] if strategy is None else [LaerCallback(rig.eager(strategy=strategy))]
    share = 4 // dist.get_world_size()
    chosen: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": share,
    }
    chosen |= {"dataset": Dataset.from_dict({"input_ids": rows}), "sizes": {"router_aux_loss_coef": 0.0}}
    with rig.fresh_accelerate():
        numbers = rig_trl.run_sft(
            folder, "qwen3_moe", callbacks, resume, fsdp_config={"state_dict_type": kind}, **chosen | settings
        )
    return {key: numbers[key] for key in ("loss", "grad_norm", "weights")}


def expert_numbers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict in which expert e's tensors are e + 1, and all others as they are."""
    made = {}
    for name, value in state.items():
        made[name] = value.clone()
        if ".experts." in name:
            made[name].copy_(torch.arange(1.0, len(value) + 1).reshape(-1, *(1,) * (value.dim() - 1)).expand_as(value))
    return made


def stamped_experts(folder: str, family: str, strategy: str, parallelism: tuple[int, int] | None = None) -> int:
    """Experts are moved about by training, then loaded with their numbers; ``save_pretrained`` writes these.

    Returns:
        Replicas moved, before.
    """
    with rig.fresh_accelerate():
        room = {"slots_per_rank": 4} if parallelism else {}
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy, **room))
        run = rig.Loop(family, plugin, parallelism=parallelism)
        run.train(2)
        engine = get_engine(run.model)
        moved = counted(engine.recorder.drain())["moved"] if engine else 0
        state = expert_numbers(run.accelerator.get_state_dict(run.model) or tiny_model(family).state_dict())
        set_model_state_dict(
            run.model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        gathered = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            run.model.save_pretrained(f"{folder}/{family}-{strategy}", state_dict=gathered)
        dist.barrier()
    return moved


def reloaded(strategy: str) -> int:
    """Trained until experts moved, then given other weights: logits are those of a plain model with these weights."""
    other = tiny_model("qwen3_moe", seed=3)
    ids = tokens(2, 7, seed=dist.get_rank())
    with rig.fresh_accelerate():
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy)))
        run.train(2)
        engine = get_engine(run.model)
        assert engine is not None
        moved = counted(engine.recorder.drain())["moved"]
        set_model_state_dict(run.model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
        for training in (True, False):
            run.model.train(training)
            got = run.model(input_ids=ids, use_cache=False).logits
            assert_close(got.detach(), other(input_ids=ids).logits.detach(), "logits")
    return moved


def best_at_end(folder: str, strategy: str, kind: str) -> int:
    """``load_best_model_at_end``: the model is that checkpoint's, which on random data is an early one."""
    settings = {
        "max_steps": 6,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "fsdp_config": {"state_dict_type": kind},
    }
    callback = LaerCallback(rig.eager(strategy=strategy))
    with rig.fresh_accelerate():
        trainer = rig_trl.sft_trainer(folder, "qwen3_moe", [callback], **settings)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint or "")
        assert best.name != "checkpoint-6", "the last is the best: the test proves nothing"
        ours = rig.gathered(trainer.model)
        ids = tokens(1, 5)
        logits = trainer.model(input_ids=ids, use_cache=False).logits.detach()
        trainer.save_model(f"{folder}/final")
    source = best
    if kind == KINDS[1]:
        source = Path(folder, "merged")
        if dist.get_rank() == 0:
            from hf_laer.integrations.transformers.merge import merge

            tiny_model("qwen3_moe").config.save_pretrained(folder)
            merge(best, source, model=folder)
        dist.barrier()
    plain = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager").train()
    far = rig.distances(ours, rig.gathered(plain))
    assert not any(far.values()), far
    assert_close(logits, plain(input_ids=ids, use_cache=False).logits.detach(), "logits")
    dist.barrier()
    return counted(callback.records)["moved"]


def files_by_rank(folder: str) -> dict[str, list[str]]:
    """Trainer saves while it trains, at its end and when told; each rank in a folder of its own, to tell them apart."""
    own = f"{folder}/{dist.get_rank()}"
    with rig.fresh_accelerate():
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
        trainer = rig_trl.sft_trainer(own, "qwen3_moe", [LaerCallback(rig.eager(strategy="llep"))], **settings)
        trainer.train()
        trainer.save_model(f"{own}/final")
    dist.barrier()
    found: dict[str, list[str]] = {}
    for path in sorted(Path(own).rglob("*")):
        if path.is_file():
            found.setdefault(path.parent.name, []).append(path.name)
    return found


def adapters(folder: str, kind: str) -> set[float]:
    """Each rank stamps its slices of adapters; saved alone, and loaded into zeros, all stamps are there."""
    lora = LoraConfig(r=6, target_modules=["q_proj", "o_proj"])

    def made() -> tuple[rig.Loop, dict[str, DTensor]]:
        plugin = rig.fsdp_plugin(LaerFSDPPlugin, state_dict_type=kind, laer=rig.eager(strategy="fsep"))
        run = rig.Loop("qwen3_moe", plugin, model=get_peft_model(tiny_model("qwen3_moe"), lora))
        return run, {name: p for name, p in run.model.named_parameters() if p.requires_grad}

    stamps = {}
    for loading in (False, True):
        with rig.fresh_accelerate():
            run, trained = made()
            frozen = {name: p.to_local().clone() for name, p in run.model.named_parameters() if name not in trained}
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.to_local().fill_(0 if loading else dist.get_rank() + 1)
            arguments = (run.accelerator.state.fsdp_plugin, run.accelerator, run.model, folder)
            if not loading:
                stamps = {name: p.full_tensor().detach() for name, p in trained.items()}
                save_fsdp_model(*arguments, adapter_only=True)
                continue
            load_fsdp_model(*arguments, adapter_only=True)
            for name, parameter in trained.items():
                assert torch.equal(parameter.full_tensor().detach(), stamps[name]), name
            for name, before in frozen.items():
                assert torch.equal(run.model.get_parameter(name).to_local(), before), name
    return {float(value) for stamp in stamps.values() for value in stamp.unique()}


def pretrained(folder: str, families: list[str], strategy: str) -> None:
    """``save_pretrained`` in small files: with the gathered state, what the unpatched model writes."""
    for family in families:
        plain = tiny_model(family)
        with rig.fresh_accelerate():
            run = rig.Loop(family, rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy)))
            state = run.accelerator.get_state_dict(run.model)
            if run.accelerator.is_main_process:
                run.model.save_pretrained(f"{folder}/{family}/ours", state_dict=state, max_shard_size="9KB")
                plain.save_pretrained(f"{folder}/{family}/plain", max_shard_size="9KB")
            dist.barrier()


def loaded_on_first_rank(folder: str, how: str) -> None:
    """RAM-efficient loading: the other ranks have no weights before ``prepare``, and their shards of them after."""
    source = tiny_model("qwen3_moe")
    with rig.fresh_accelerate():
        if dist.get_rank() == 0:
            source.save_pretrained(f"{folder}/{how}")
        dist.barrier()
        laer = rig.eager(strategy="fsep")
        kind = {"kind": LaerFSDPPlugin, "laer": laer} if how == "plugin" else {}
        plugin = rig.fsdp_plugin(**kind, cpu_ram_efficient_loading=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/{how}", experts_implementation="eager")
        if dist.get_rank():  # some versions of Transformers load on all ranks all the same
            for module in model.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="meta")))
        if how == "before":
            patch_model(model, laer)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        if how == "after":
            with pytest.raises(RuntimeError, match=r"call patch_model before accelerator\.prepare"):
                patch_model(model, laer)
            return
        assert not any(parameter.is_meta or parameter.to_local().is_meta for parameter in model.parameters())
        for name, value in rig.gathered(model).items():
            np.testing.assert_array_equal(value, source.get_parameter(name).detach().numpy(), err_msg=name)


def killed_while_saving(folder: str, kind: str, moment: str) -> None:
    """Three steps, saved after each; at the second save the ranks are killed, the writing one in mid-file."""
    _kill_at(moment, 2)
    trained_by_trainer(folder, kind, "fsep", None, **CUT)


def state_killed_while_saving(folder: str, kind: str, moment: str) -> None:
    """Two steps, a state, a third step, and a second state under the same name, whose save is killed."""
    with rig.fresh_accelerate():
        run = shared("fsep", kind)
        run.train(2)
        save_state(run.accelerator, f"{folder}/state")
        run.train(1)
        _kill_at(moment, 1)
        save_state(run.accelerator, f"{folder}/state")


def resumed_after_a_killed_state(folder: str, kind: str, name: str) -> None:
    """The earlier state is whole: from it, the next steps are those of a run that was never cut."""
    with rig.fresh_accelerate():
        whole = shared("llep", kind).train(4)
    with rig.fresh_accelerate():
        run = shared("llep", kind)
        run.accelerator.load_state(f"{folder}/{name}")
        run.micro = 4
        ours = run.train(2)
    rig.assert_same(ours, {key: whole[key][2:] for key in ("loss", "grad_norm")} | {"weights": whole["weights"]})


def _kill_at(moment: str, time: int) -> None:
    """Kills this process in the ``time``-th save.

    Within the model's file or the optimizer's, before Trainer's state, or before a whole state takes its name.
    """
    seen = {"model": 0, "optimizer": 0, "state": 0, "rename": 0}

    def count(what: str, path: str) -> None:
        seen[what] += 1
        if what == moment and seen[what] == time:
            if path:
                with open(path, "wb") as cut:
                    cut.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)

    save, write, optimizer_and_scheduler = (
        torch.save,
        FileSystemWriter.write_data,
        Trainer._save_optimizer_and_scheduler,
    )

    def saving(thing: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        for what, name in (("model", "pytorch_model_fsdp.bin"), ("optimizer", "optimizer.bin")):
            if str(path).endswith(name):
                count(what, str(path))
        return save(thing, path, *args, **kwargs)

    def writing(writer: Any, plan: Any, planner: Any) -> Any:
        what = "optimizer" if "optimizer" in str(writer.path) else "model"
        count(what, str(Path(writer.path, f"{plan.storage_data.prefix}0.distcp")))
        return write(writer, plan, planner)

    def saving_both(trainer: Any, output: str) -> Any:
        done = optimizer_and_scheduler(trainer, output)
        count("state", "")
        return done

    def renaming(path: Path, target: Any) -> Any:
        if path.name.endswith(".part"):
            count("rename", "")
        return replace(path, target)

    replace, Path.replace = Path.replace, renaming  # type: ignore[method-assign]
    torch.save, FileSystemWriter.write_data, Trainer._save_optimizer_and_scheduler = saving, writing, saving_both


def resumed_after_a_kill(folder: str, kind: str, wanted: Numbers) -> None:
    """``resume_from_checkpoint=True`` finds the earlier checkpoint, and goes on as an uninterrupted run."""
    assert Path(folder, "checkpoint-2").is_dir(), "the second save had not begun"
    before = _contents(Path(folder, "checkpoint-1"))
    dist.barrier()
    ours = trained_by_trainer(folder, kind, "fsep", True, **CUT)  # type: ignore[arg-type]
    assert _contents(Path(folder, "checkpoint-1")) == before, "it began anew"
    assert len(ours["loss"]) == CUT["max_steps"], "two steps were resumed"
    rig.assert_same(ours, wanted)
    dist.barrier()


def _contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was written, and its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def marks_and_parts(folder: str) -> None:
    """A later checkpoint of an abandoned branch is not whole while it is written over; old states stay till the end."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    for resume in (None, f"{folder}/checkpoint-2"):
        seen: list[bool] = []
        save = Trainer._save_optimizer_and_scheduler

        def saving(trainer: Any, output: str, save: Any = save, seen: list[bool] = seen) -> Any:
            seen.append(Path(output, "trainer_state.json").exists())
            return save(trainer, output)

        with rig.fresh_accelerate(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_save_optimizer_and_scheduler", saving)
            rig_trl.run_sft(folder, "qwen3_moe", [LaerCallback(rig.eager(strategy="llep"))], resume, **settings)
        assert seen == ([False, False] if resume is None else [False])
        assert Path(folder, "checkpoint-4", "trainer_state.json").exists()
    with rig.fresh_accelerate():
        run = shared("llep")
        run.train(1)
        for _ in range(2):
            save_state(run.accelerator, f"{folder}/state")
            assert {path.name for path in Path(folder).glob("state*")} == {"state"}
            dist.barrier()
            Path(folder, "state.part").mkdir(exist_ok=True)
            dist.barrier()
        run.accelerator.project_configuration.automatic_checkpoint_naming = True
        with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
            save_state(run.accelerator, f"{folder}/state")
