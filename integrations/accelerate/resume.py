"""The engine's memory (recent loads, placements) in Accelerate's ``save_state`` and ``load_state``.

Weights and optimizer need nothing from here: they are DTensors. Without this file a resumed run would still
be exact, but would place its experts as if it had just begun.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_laer.engine import Engine

logger = logging.getLogger(__name__)
FILE = "laer_state.json"


def register_state_hooks(accelerator: Accelerator, engine: Engine) -> None:
    """Saves and loads ``engine``'s memory with the state: one file, as it is the same on all ranks."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            path = Path(folder, FILE)
            aside = path.with_name(f"{FILE}.tmp")
            aside.write_text(json.dumps(engine.state_dict()), encoding="utf-8")
            aside.replace(path)

    def load(models: list[Any], folder: str) -> None:
        path = Path(folder, FILE)
        if not path.exists():  # a checkpoint from before the model was patched
            logger.info("no %s in the checkpoint: placements start anew", FILE)
        take_up(engine, lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}, str(path))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_state(accelerator: Accelerator, folder: str | Path, **settings: Any) -> Path:
    """``accelerator.save_state``, written aside, then renamed: ``folder`` is whole, or what it was before. Collective.

    A save that is killed leaves ``folder.part``, which the next one removes. An earlier state in ``folder`` is
    ``folder.old`` while the new one takes its name.

    Args:
        accelerator: Whose state.
        folder: On a file system that all ranks share.
        settings: Given on to ``accelerator.save_state``.

    Raises:
        ValueError: Accelerate names the checkpoints itself.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("automatic_checkpoint_naming=True names the folder itself: set it to False, and name folders")
    folder = Path(folder)
    part, old = (folder.with_name(folder.name + suffix) for suffix in (".part", ".old"))
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part), **settings)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if folder.exists():
            folder.replace(old)
        part.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return folder


def take_up(engine: Engine, read: Callable[[], Any], what: str) -> None:
    """Lets the engine go on from what rank 0 reads. Collective.

    Ranks that remember differently would plan differently, and wait for each other; a node may not see the file.

    Args:
        engine: On every rank.
        read: Called on rank 0 only; an empty memory is that of a checkpoint from before the model was patched.
        what: The file, for messages.

    Raises:
        ValueError: On every rank alike: the file cannot be read, or holds no memory of this model.
    """
    memory, fault = _on_first_rank(read)
    try:
        if fault:
            raise ValueError(fault)
        engine.load_state_dict(memory)
    except ValueError as error:
        raise ValueError(f"{what}: {error}. Without it, the run is as exact, and its placements start anew") from error


def _on_first_rank(read: Callable[[], Any]) -> tuple[Any, str]:
    """What rank 0 reads, and what went wrong there or ``""``, on every rank."""
    joined = dist.is_available() and dist.is_initialized()
    box: list[Any] = [{}, ""]
    if not joined or dist.get_rank() == 0:
        try:
            box[0] = read()
        except (OSError, ValueError, RecursionError) as error:
            box[1] = str(error) or type(error).__name__
    if joined:
        dist.broadcast_object_list(box, src=0)
    return box[0], box[1]
