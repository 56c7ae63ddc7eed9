"""What happens once, before experts are sharded: ranks compare what they were told, planners are compiled, values come
from the one rank that has them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_laer.comm.arena import Arena, make_arena
from hf_laer.comm.base import Communicator
from hf_laer.comm.groups import Communicators, device_memory, device_name
from hf_laer.comm.peers import PeerCommunicator
from hf_laer.comm.process_group import ProcessGroupCommunicator
from hf_laer.compute.kernels import MOST_RANKS
from hf_laer.config import LaerConfig
from hf_laer.plan import compile_kernels
from hf_laer.shard.home import Home, Layout, sharded_home

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


def check_alone(layer: str) -> None:
    """A layer whose experts are not sharded runs on one rank.

    Raises:
        RuntimeError: There are several.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"{layer} runs on {dist.get_world_size()} ranks but its experts are not sharded: call "
            "accelerator.prepare(model, optimizer) with an FSDP2 plugin first, or patch_model(model, config, mesh=mesh)"
        )


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


def arena_for(
    weights: Communicator, nbytes: int, config: LaerConfig, ranks_per_node: int, device: torch.device, seconds: float
) -> Arena | None:
    """Memory that the ranks that shard the experts read of each other, where they are to. Collective over ``weights``.

    Args:
        weights: The ranks.
        nbytes: What the layers want at most.
        config: Says whether it is wanted.
        ranks_per_node: Ranks that share a node.
        device: This rank's.
        seconds: After which a rank that does not come is given up.
    """
    share = _share_memory(weights, config, ranks_per_node, device)
    return make_arena(weights, nbytes, device, seconds) if share else None


def _share_memory(comm: Communicator, config: LaerConfig, ranks_per_node: int, device: torch.device) -> bool:
    """Whether ranks are to read and write each other's memory, if they can."""
    wanted = device.type == "cuda" if config.peer_memory is None else config.peer_memory
    return wanted and not config.check_collectives and 1 < comm.size <= ranks_per_node


def with_peers(
    comms: Communicators, experts: int, config: LaerConfig, ranks_per_node: int, device: torch.device, seconds: float
) -> Communicators:
    """The communicators, tokens by memory that their ranks share, where these are all that shard the experts.

    Args:
        comms: As they were made.
        experts: Of the layer that has most.
        config: Says whether it is wanted.
        ranks_per_node: Ranks that share a node.
        device: This rank's.
        seconds: After which a rank that does not come is given up.
    """
    tokens = comms.tokens
    if not isinstance(tokens, ProcessGroupCommunicator) or not tokens.size == comms.weights.size <= MOST_RANKS:
        return comms
    if not _share_memory(tokens, config, ranks_per_node, device):
        return comms
    # Loads, rows for each rank, and what tuners say of the layouts of two layers.
    peers = PeerCommunicator(tokens, experts + tokens.size + 4, device, seconds)
    return replace(comms, tokens=peers, peers=peers)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def home_of(
    parameter: nn.Parameter,
    dim: int,
    mesh: DeviceMesh,
    weights: Communicator,
    dtype: torch.dtype,
    src_rank: int | None,
    offload: bool,
) -> Home:
    """Shards a parameter that is whole on every rank, or on one. Collective over the world.

    Args:
        parameter: The parameter.
        dim: The dimension that is cut.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        weights: The ranks of the shard dimension.
        dtype: Of the home.
        src_rank: The only rank that has the values; ``None`` if all have.
        offload: The home lives on the host.
    """
    layout = Layout.sharded(tuple(parameter.shape), dim, weights.size)
    full = parameter.detach()
    if src_rank is not None:
        full = _broadcast(full, dtype, device_of(mesh), src_rank)
    device = torch.device("cpu") if offload else device_of(mesh)
    # A copy, so that the block does not keep the full tensor's memory.
    block = layout.block(full, weights.rank).to(device, dtype, copy=True).contiguous()
    if offload and mesh.device_type == "cuda":
        block = block.pin_memory()
    return sharded_home(block, layout, dim, mesh, parameter.requires_grad)


def _broadcast(full: torch.Tensor, dtype: torch.dtype, device: torch.device, src_rank: int) -> torch.Tensor:
    """The values of the one rank that has them, on every rank, in ``dtype``. Collective over the world."""
    if dist.get_rank() == src_rank:
        values = full.to(device, dtype).contiguous()
    else:
        values = torch.empty(full.shape, dtype=dtype, device=device)
    dist.broadcast(values, src=src_rank)
    return values
