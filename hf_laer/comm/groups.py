"""The process groups of one engine, made once for all its layers: tokens, weights, and replicas of the whole set."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from hf_laer.comm.base import Communicator
from hf_laer.comm.check import Check, CheckedCommunicator
from hf_laer.comm.local import LocalCommunicator
from hf_laer.comm.process_group import ProcessGroupCommunicator
from hf_laer.comm.watch import Watch

# Process groups cost sockets, threads and memory for as long as the world lives: equal ones are shared.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Communicators:
    """What one engine talks over.

    Args:
        tokens: This rank's token group; tokens never leave it.
        weights: The ranks over which experts are sharded; loads and weights travel here.
        replicas: The ranks that hold the same shards (HSDP), or a group of one.
        node: Those of ``weights`` on this rank's node, where there are several nodes and ranks with others on theirs.
        peers: Those of ``weights``, where they share memory; then ``tokens`` is the same.
    """

    tokens: Communicator = field(default_factory=LocalCommunicator)
    weights: Communicator = field(default_factory=LocalCommunicator)
    replicas: Communicator = field(default_factory=LocalCommunicator)
    node: Communicator | None = None
    peers: Communicator | None = None

    @property
    def everyone(self) -> Communicator:
        """Those over which experts are sharded, for what they tell each other."""
        return self.weights if self.peers is None else self.peers

    def everyones(self, counts: torch.Tensor) -> np.ndarray:
        """int64 ``[N, E]``: the loads of all ranks of the world, replica by replica. Collective.

        Args:
            counts: int64 ``[E]``, this rank's.
        """
        return self.replicas.all_gather(self.weights.all_gather(counts)).flatten(0, 1).cpu().numpy()

    def of_group(self, loads: np.ndarray, size: int) -> np.ndarray:
        """The rows of this rank's token group of ``size`` ranks, given those of all that shard the experts."""
        if len(loads) == size:
            return loads
        start = self.weights.rank // size * size
        return loads[start : start + size]

    @property
    def averaged_over(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.weights.size * self.replicas.size


def communicators(
    mesh: DeviceMesh, group_size: int, watch: Watch, check: bool = False, ranks_per_node: int | None = None
) -> Communicators:
    """Makes and warms the groups of a 1-D (shard) or 2-D (replicate, shard) mesh.

    Collective over all ranks of the world: each rank makes every group, in the same order.

    Args:
        mesh: The FSDP mesh.
        group_size: Consecutive ranks of the shard dimension that exchange tokens.
        watch: Told the rank and the groups' time limit; errors and long waits are reported through it.
        check: Ranks compare every collective before they issue it (:mod:`hf_laer.comm.check`).
        ranks_per_node: Consecutive ranks of the shard dimension that share a node; ``None`` means all.

    Raises:
        ValueError: The mesh leaves ranks out.
    """
    if mesh.mesh.numel() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.mesh.numel()} of the {dist.get_world_size()} ranks: experts are sharded over all of "
            "them; use a 1-D mesh of the world, or (replicate, shard)"
        )
    grid = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
    rows = [tuple(row) for row in grid.tolist()]
    columns = [tuple(column) for column in grid.t().tolist()]
    blocks = _blocks(rows, group_size)
    timeout = group_timeout(mesh.device_type)
    watch.begin(dist.get_rank(), timeout.total_seconds())
    mine = partial(_mine, timeout=timeout, watch=watch, check=_check(watch) if check else None)
    made = Communicators(
        tokens=mine(blocks, "tokens"), weights=mine(rows, "weights"), replicas=mine(columns, "replicas")
    )
    if ranks_per_node is not None and 1 < ranks_per_node < len(rows[0]):
        made = replace(made, node=mine(_blocks(rows, ranks_per_node), "weights inside the node"))
    _warm(made, mesh.device_type)
    return made


def _blocks(rows: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    return [row[i : i + size] for row in rows for i in range(0, len(row), size)]


def forget_groups() -> None:
    """Lets go of all groups, once their world has been destroyed."""
    _made.clear()


def ranks_of_node() -> int:
    """Ranks that share this node: the launcher's word, or the GPUs, or the world."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device_name() -> str:
    """The kind of this rank's device; ``cpu`` where there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def device_memory() -> int:
    """Bytes of this rank's GPU; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def group_timeout(device_type: str) -> timedelta:
    """The time limit that the user gave the default process group; a new group would have its back end's default."""
    world = dist.group.WORLD
    assert world is not None
    try:
        return world._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # a back end that does not say
        return default_pg_timeout


def _check(watch: Watch) -> Check:
    """A check under a name of its own in the ranks' store. Collective over the world."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return Check(dist.PrefixStore(f"hf_laer/{name[0]}", _get_default_store()), watch)


def _mine(
    partition: list[tuple[int, ...]], purpose: str, timeout: timedelta, watch: Watch, check: Check | None
) -> Communicator:
    """The communicator of this rank's part; parts of one rank need no process group."""
    if len(partition[0]) == 1:
        return LocalCommunicator()
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    for ranks in partition:
        if (purpose, ranks) not in known:
            known[purpose, ranks] = dist.new_group(list(ranks), timeout, group_desc=f"hf_laer_{purpose}")
    me = dist.get_rank()
    ranks = next(ranks for ranks in partition if me in ranks)
    comm = ProcessGroupCommunicator(known[purpose, ranks], purpose, watch)
    return comm if check is None else CheckedCommunicator(comm, purpose, ranks, check)


def _warm(made: Communicators, device_type: str) -> None:
    """Connects every group now: a first use when memory is nearly full is where bootstraps stall."""
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else device_type
    for group in (made.tokens, made.weights, made.replicas, *([made.node] if made.node is not None else [])):
        ones = torch.ones(group.size, device=device)
        group.all_to_all(ones, [1] * group.size, [1] * group.size)
        group.all_reduce(ones)
