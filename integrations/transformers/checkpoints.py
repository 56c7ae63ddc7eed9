"""Trainer's checkpoints that were cut short: ``resume_from_checkpoint=True`` passes them over.

Trainer writes straight into ``checkpoint-N``, and ``trainer_state.json`` last of all on the first rank, which also
ends each sharded save after all ranks have written. So a folder whose state can be read is whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from hf_laer.integrations import upstream

logger = logging.getLogger(__name__)
STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def pass_over_cut_checkpoints() -> None:
    """Makes Trainer look for the last whole checkpoint. Where Transformers has changed, it stays as it is."""
    try:
        upstream.install("last_checkpoint", _last_whole)
    except RuntimeError as error:
        logger.warning("resume_from_checkpoint=True may take a checkpoint that was cut short: %s", error)


def is_whole(checkpoint: str | Path) -> bool:
    """Whether Trainer finished writing this folder."""
    try:
        state = json.loads(Path(checkpoint, STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict)


def begin_again(checkpoint: str | Path) -> None:
    """Takes the mark of a whole checkpoint from a folder that is about to be written over.

    A run that resumed from an earlier step writes its later ones again: cut short, old and new shards would pass for
    one checkpoint.
    """
    Path(checkpoint, STATE).unlink(missing_ok=True)


def _last_whole(original: upstream.Function, folder: str) -> str | None:
    """``get_last_checkpoint``: the last one that is whole."""
    found = original(folder)
    if found is None or is_whole(found):
        return found
    steps = sorted((int(at[1]) for name in os.listdir(folder) if (at := _NAME.fullmatch(name))), reverse=True)
    names = [os.path.join(folder, f"checkpoint-{step}") for step in steps]
    whole = next((name for name in names if is_whole(name)), None)
    cut = names[: names.index(whole)] if whole is not None else names
    logger.warning("%s: the save was cut short (no readable %s): going on from %s", ", ".join(cut), STATE, whole)
    return whole
