"""The engine's memory (recent loads, placements) in Accelerate's ``save_state`` and ``load_state``.

Weights and optimizer need nothing from here: they are DTensors. Without this file a resumed run would still
be exact, but would place its experts as if it had just begun.
"""

from __future__ import annotations

import json
import logging
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
