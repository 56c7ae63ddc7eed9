"""Memory that the ranks of one host read of each other: what is in it needs no message to be fetched.

On GPUs it is PyTorch's symmetric memory, read by the copy engines, which take no multiprocessor from the products. On
CPUs it is a file that all map.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hf_laer.comm.base import Communicator
from hf_laer.comm.process_group import ProcessGroupCommunicator

logger = logging.getLogger(__name__)

# Of a device's memory an arena may take this part.
_PART = 16
# An arena's streams: what is written into it, and what is read out of others'.
LAYING, PULLING = range(2)


class Arena(Protocol):
    """One block of bytes on every rank, and two streams of its own for what is done with them.

    Attributes:
        nbytes: Of each rank's block.
    """

    nbytes: int

    def of(self, rank: int) -> torch.Tensor:
        """uint8 ``[nbytes]``: the block of a rank, for this one to read, or its own, to write."""
        ...

    def meet(self) -> None:
        """What any rank did before it on its stream is done before what any does there after it. Collective.

        Only on one of the streams.
        """
        ...

    def mark(self) -> Any:
        """A point in what this rank's device has to do, on its own stream or, inside of :meth:`aside`, on that one."""
        ...

    @contextmanager
    def aside(self, after: Any, stream: int) -> Iterator[None]:
        """What is begun inside runs on one of the arena's streams, after a mark."""
        ...

    def wait(self, mark: Any) -> None:
        """What this rank's device has to do from here on comes after a mark."""
        ...

    def join(self) -> None:
        """The same, after all that was begun aside."""
        ...


class SymmetricArena:
    """An :class:`Arena` of GPUs that reach each other's memory.

    Args:
        group: The ranks.
        nbytes: Of each rank's block, the same on all.
        device: This rank's.
        seconds: A rank that does not come to a meeting for so long ends the others' programs.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, seconds: float) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.nbytes = nbytes
        self._memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)
        self._blocks = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        self._streams = [torch.cuda.Stream(device) for _ in (LAYING, PULLING)]
        self._limit = min(int(seconds * 1e3), 2**31 - 1)

    def of(self, rank: int) -> torch.Tensor:
        """See :class:`Arena`."""
        return self._blocks[rank]

    def meet(self) -> None:
        """See :class:`Arena`."""
        self._handle.barrier(channel=0, timeout_ms=self._limit)

    def mark(self) -> torch.cuda.Event:
        """See :class:`Arena`."""
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def aside(self, after: torch.cuda.Event, stream: int) -> Iterator[None]:
        """See :class:`Arena`."""
        with torch.cuda.stream(self._streams[stream]):
            self._streams[stream].wait_event(after)
            yield

    def wait(self, mark: torch.cuda.Event) -> None:
        """See :class:`Arena`."""
        torch.cuda.current_stream().wait_event(mark)

    def join(self) -> None:
        """See :class:`Arena`."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


class SharedArena:
    """An :class:`Arena` of processes on one host's CPUs; everything is done when it is asked for.

    Args:
        comm: The ranks.
        nbytes: Of each rank's block, the same on all.
    """

    def __init__(self, comm: ProcessGroupCommunicator, nbytes: int) -> None:
        self.nbytes, self._comm = nbytes, comm
        with tempfile.TemporaryDirectory() as folder:
            told: list[list[str]] = [[] for _ in range(comm.size)]
            mine = [str(Path(folder) / "arena")]
            own = _mapped(mine[0], nbytes)
            dist.all_gather_object(told, mine, group=comm.group)
            self._blocks = [own if path == mine[0] else _mapped(path, nbytes) for (path,) in told]
            # Nobody's file goes before all have mapped it.
            self.meet()

    def of(self, rank: int) -> torch.Tensor:
        """See :class:`Arena`."""
        return self._blocks[rank]

    def meet(self) -> None:
        """See :class:`Arena`."""
        self._comm.all_reduce(torch.zeros(1))

    def mark(self) -> None:
        """See :class:`Arena`."""

    @contextmanager
    def aside(self, after: None, stream: int) -> Iterator[None]:
        """See :class:`Arena`."""
        yield

    def wait(self, mark: None) -> None:
        """See :class:`Arena`."""

    def join(self) -> None:
        """See :class:`Arena`."""


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    """uint8 ``[nbytes]`` in a file, which is made if there is none."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def make_arena(comm: Communicator, nbytes: int, device: torch.device, seconds: float) -> Arena | None:
    """The arena of ``comm``, or ``None`` where its ranks cannot read each other's memory, or it would take too much.

    Collective over ``comm``.

    Args:
        comm: The ranks, all of one host.
        nbytes: Of each rank's block; the largest that any rank names counts.
        device: This rank's.
        seconds: See :class:`SymmetricArena`.
    """
    if not isinstance(comm, ProcessGroupCommunicator):
        return None
    willing = _reaches_all(device, comm.size) and nbytes <= _most_bytes(device)
    told = torch.tensor([nbytes, -int(willing)], dtype=torch.int64, device=device)
    nbytes, refused = comm.to_host(comm.all_gather(told)).amax(0).tolist()
    if nbytes == 0 or refused == 0:
        return None
    made = _made(comm, nbytes, device, seconds)
    # Where it failed on one rank nobody has any.
    able = torch.tensor([made is not None], dtype=torch.int64, device=device)
    return made if comm.to_host(comm.all_gather(able)).all() else None


def _made(comm: ProcessGroupCommunicator, nbytes: int, device: torch.device, seconds: float) -> Arena | None:
    try:
        if device.type == "cpu":
            return SharedArena(comm, nbytes)
        return SymmetricArena(comm.group, nbytes, device, seconds)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "ranks of this host cannot read each other's memory, so that experts travel in messages (peer_memory=False "
            "does not try): %s",
            error,
        )
        return None


def _most_bytes(device: torch.device) -> int:
    """More than so many is better spent on what is computed."""
    return torch.cuda.get_device_properties(device).total_memory // _PART if device.type == "cuda" else 2**62


def _reaches_all(device: torch.device, ranks: int) -> bool:
    """Whether this rank's device can read those of the other ranks, as far as it can know."""
    if device.type != "cuda":
        return True
    count, me = torch.cuda.device_count(), device.index
    # Where each process sees its own GPU alone, nothing is known.
    return count >= ranks and all(torch.cuda.can_device_access_peer(me, other) for other in range(count) if other != me)
