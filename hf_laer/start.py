"""What happens once, before experts are sharded: ranks compare what they were told, planners are compiled, values come
from the one rank that has them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_laer.comm.groups import device_memory, device_name
from hf_laer.plan import compile_kernels

logger = logging.getLogger(__name__)


def told_alike(told: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank was told, once it is known to be the same; and its ``device`` and ``memory``. Collective.

    Raises:
        ValueError: A rank was told something else.
    """
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, {**told, "device": device_name(), "memory": device_memory()})
    for rank, other in enumerate(everyone):
        differing = sorted(key for key in told if other[key] != everyone[0][key])
        if differing:
            raise ValueError(
                f"rank {rank} has another {' and '.join(differing)} than rank 0, and would plan otherwise: give "
                "all ranks one LaerConfig and one profile, with ranks_per_node set where nodes have different "
                "numbers of ranks"
            )
    return everyone


def compile_planners(mesh: DeviceMesh, ranks_per_node: int) -> None:
    """Now rather than in the first step; one rank of each node first, the others load what it compiled. Collective."""
    first = dist.get_rank() % ranks_per_node == 0
    if dist.get_rank() == 0:
        logger.info("loading the planners; the first run on a machine compiles them, which takes about a minute")
    if first:
        compile_kernels()
    dist.barrier(device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None)
    if not first:
        compile_kernels()


def broadcast(full: torch.Tensor, dtype: torch.dtype, device: torch.device, src_rank: int) -> torch.Tensor:
    """The values of the one rank that has them, on every rank, in ``dtype``. Collective over the world."""
    if dist.get_rank() == src_rank:
        values = full.to(device, dtype).contiguous()
    else:
        values = torch.empty(full.shape, dtype=dtype, device=device)
    dist.broadcast(values, src=src_rank)
    return values
