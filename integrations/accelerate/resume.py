"""The engine's memory (recent loads, placements) in Accelerate's ``save_state`` and ``load_state``.

Weights and optimizer need nothing from here: they are DTensors. Without this file a resumed run would still
be exact, but would place its experts as if it had just begun.
"""

from __future__ import annotations

import json
import logging
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
            Path(folder, FILE).write_text(json.dumps(engine.state_dict()), encoding="utf-8")

    def load(models: list[Any], folder: str) -> None:
        path = Path(folder, FILE)
        memory = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        engine.load_state_dict(of_first_rank(memory))
        if not memory:  # a checkpoint from before the model was patched
            logger.info("no %s in the checkpoint: placements start anew", FILE)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def of_first_rank(memory: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's ``memory``, on every rank. Collective.

    Ranks that remember differently would plan differently, and wait for each other; a node may not see the file.
    """
    box = [memory]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]
