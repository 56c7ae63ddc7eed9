"""Worlds of their own for cases that break one: a default process group with a short time limit, for one case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from hf_laer.plan import compile_kernels
from tests.pool import GROUP_SECONDS


@contextmanager
def own_world(folder: str, seconds: float) -> Iterator[None]:
    """A gloo world with a time limit in the place of the pool's; the pool gets a sound one back afterwards.

    The ranks meet before they part, through files: whatever a case did to its groups, no rank leaves while another
    still waits for it.

    Args:
        folder: New for each case, the same on all ranks.
        seconds: The limit.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compile_kernels()
    _renew(Path(folder, "case"), rank, ranks)
    # Only now: ranks may come to their first case at very different times.
    _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    try:
        yield
    finally:
        gate = dist.FileStore(str(Path(folder, "gate")), ranks)
        gate.add("left", 1)
        gate.set(f"left-{rank}", "1")
        gate.wait([f"left-{other}" for other in range(ranks)], timedelta(seconds=GROUP_SECONDS))
        _renew(Path(folder, "after"), rank, ranks)


def _renew(path: Path, rank: int, ranks: int) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(str(path), ranks)
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
