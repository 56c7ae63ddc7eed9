"""What the commands that run on all ranks of torchrun share."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_laer.comm.groups import forget_groups

# Seconds for gloo's threads to let go of the last collectives' tensors.
PARTING = 0.25


@contextmanager
def joined() -> Iterator[torch.device]:
    """This rank's device; joins torchrun's processes, or is a world of its own."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        if started:
            _leave()


def _leave() -> None:
    """Ends the process group, and what its threads still hold.

    A gloo thread lets go of a collective's tensors after it has said that the collective is done. On a busy machine the
    process may be ending by then, and Python aborts it when such a thread asks for the interpreter. A group that nobody
    holds joins its threads; DTensor's caches hold the world's, whose threads get a moment.
    """
    dist.destroy_process_group()
    forget_groups()
    gc.collect()
    time.sleep(PARTING)


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Figures and versions as JSON, written aside, then renamed."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    about = {"ranks": ranks, "torch": str(torch.__version__), "hf_laer": version_of("hf_laer")}
    write_aside(path, json.dumps(about | figures, indent=2))


def write_aside(path: Path, text: str) -> None:
    """Writes a file aside, then renames it."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def version_of(package: str) -> str | None:
    """The installed version; ``None`` where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
