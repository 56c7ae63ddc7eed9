"""SFT of a Hugging Face Mixture-of-Experts model: TRL's SFTTrainer, Accelerate's FSDP2, experts in parallel
by hf_laer.

    accelerate launch --config_file recipes/accelerate/cpu_2processes.yaml recipes/sft.py --config
    recipes/smollm2_moe.yaml

Without ``--model_name_or_path`` it trains a MoE made on the spot from a small dense model, and without
``--dataset_name`` on chat pairs made from this Python: neither needs a download. Where there is no GPU it
trains on the CPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from arguments import Settings, parse
from data import open_dataset
from progress import ProgressCallback
from report import check_moves, report
from rich.console import Console
from transformers import PrinterCallback
from trl import SFTTrainer, get_peft_config, get_quantization_config
from upcycle import UpcycleConfig, make_checkpoint

from hf_laer.integrations.accelerate import enable_cpu_fsdp
from hf_laer.integrations.transformers.validate import check_processes
from hf_laer.integrations.trl import LaerCallback

logger = logging.getLogger(__name__)


def main() -> None:
    """Trains, reports, saves."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Other packages' notices to their own developers, one per process.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not torch.cuda.is_available():
        enable_cpu_fsdp()
    settings = parse()
    state = PartialState()
    check_processes(state)
    run(settings, state, make_console(state))
    # A process that leaves while another still saves may abort at exit. After an error the launcher ends them all:
    # waiting for the others here would hang.
    state.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(settings: Settings, state: PartialState, console: Console) -> None:
    """The job: model, data, training, report, checkpoint."""
    callback = make_callback(settings)
    output = Path(settings.training.output_dir or "outputs")
    trainer = make_trainer(settings, model_path(settings, output, state), callback, console)
    trainer.train(resume_from_checkpoint=settings.training.resume_from_checkpoint)
    records = list(callback.records) if callback else []
    if callback and state.is_main_process:
        report(records, output, console, strategy=settings.laer.strategy, choices=callback.choices)
    final = save(trainer, output / "final", state)
    console.print(f"checkpoint: {final}", highlight=False)
    if callback and settings.recipe.require_moves:
        check_moves(records, settings.laer.strategy)


def make_console(state: PartialState) -> Console:
    """The terminal, for the first process alone; wide enough for a table where the output goes to a file."""
    console = Console(quiet=not state.is_main_process)
    if not console.is_terminal:
        console.width = 132
    return console


def make_callback(settings: Settings) -> LaerCallback | None:
    """The callback that patches the model; ``None`` for strategy ``none``."""
    config = settings.laer.to_config()
    if config is None:
        return None
    callback = LaerCallback(config, trace=settings.recipe.trace)
    # What moves is to be seen: nothing would be of layers that `auto` leaves to FSDP2.
    callback.recorded |= settings.recipe.require_moves
    return callback


def model_path(settings: Settings, folder: Path, state: PartialState) -> str:
    """The checkpoint to train: the one named, or one that the first process makes in ``folder``.

    Raises:
        FileNotFoundError: The made one is not seen by this process, as on a node with another disk.
    """
    named = settings.model.model_name_or_path
    if named is not None:
        return named
    output = folder / f"upcycled-{fingerprint(settings.upcycle)}"
    if state.is_main_process and not output.exists():
        folder.mkdir(parents=True, exist_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # The others wait: their cores are free meanwhile.
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or threads)
        make_checkpoint(None, output, settings.upcycle, device=device)
        torch.set_num_threads(threads)
    state.wait_for_everyone()
    if not output.exists():
        raise FileNotFoundError(
            f"{output}, made by the first process, is not seen by process {state.process_index}: put "
            "output_dir on a disk that all nodes share, or name a checkpoint with --model_name_or_path"
        )
    return str(output)


def fingerprint(config: UpcycleConfig) -> str:
    """A short name that differs for different settings, so that a changed setting makes a new checkpoint."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{config.replicas}x{config.slices}-top{config.top_k}-{digest}"


def make_trainer(settings: Settings, path: str, callback: LaerCallback | None, console: Console) -> SFTTrainer:
    """TRL's trainer with our callbacks, and our progress in place of its own."""
    script, training = settings.script, settings.training
    dataset = open_dataset(
        script.dataset_name,
        script.dataset_config,
        streaming=script.dataset_streaming,
        per_domain=settings.recipe.rows_per_domain,
        block=settings.recipe.rows_per_block,
        seed=training.seed,
    )
    given: Any = training.model_init_kwargs or {}
    training.model_init_kwargs = {**model_options(settings), **given}
    training.disable_tqdm = True
    evaluated = training.eval_strategy != "no"
    trainer = SFTTrainer(
        model=path,
        args=training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if evaluated else None,
        peft_config=get_peft_config(settings.model),
        callbacks=[*([callback] if callback else []), ProgressCallback(console)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def model_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    model = settings.model
    options: dict[str, Any] = {"revision": model.model_revision, "dtype": model.dtype}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    quantization: Any = get_quantization_config(model)
    if settings.recipe.dequantize:
        from transformers.utils.quantization_config import Mxfp4Config

        quantization = Mxfp4Config(dequantize=True)
    if quantization is not None:
        options["quantization_config"] = quantization
    return options


def save(trainer: SFTTrainer, final: Path, state: PartialState) -> Path:
    """Writes the trained model as an ordinary Transformers checkpoint, aside first, then renamed."""
    aside = final.with_name(final.name + ".tmp")
    if state.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
    if trainer.is_fsdp_enabled:
        # With sharded state dicts the trainer would write shards that no from_pretrained reads.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    state.wait_for_everyone()
    trainer.save_model(str(aside))
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    return final


if __name__ == "__main__":
    main()
