"""Memory that the ranks of one host read of each other: what is in it needs no message to be fetched.

On GPUs it is PyTorch's symmetric memory, read by the copy engines, which take no multiprocessor from the products. On
CPUs it is a file that all map.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from hf_laer.comm.base import Communicator
from hf_laer.comm.process_group import ProcessGroupCommunicator

logger = logging.getLogger(__name__)

# Of a device's memory an arena may take this part.
_PART = 16
# An arena's streams: what is written into it, and what is read out of others'.
LAYING, PULLING = range(2)
_Made = TypeVar("_Made")


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
        own: This rank's block, from :meth:`block`.
        seconds: A rank that does not come to a meeting for so long ends the others' programs.
    """

    def __init__(self, group: dist.ProcessGroup, own: torch.Tensor, seconds: float) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.nbytes, self._memory = own.numel(), own
        self._handle = symmetric.rendezvous(own, group)
        self._blocks = [self._handle.get_buffer(rank, (self.nbytes,), torch.uint8) for rank in range(group.size())]
        self._streams = [torch.cuda.Stream(own.device) for _ in (LAYING, PULLING)]
        self._limit = min(int(seconds * 1e3), 2**31 - 1)

    @staticmethod
    def block(nbytes: int, device: torch.device) -> torch.Tensor:
        """uint8 ``[nbytes]`` that other ranks can reach; no word with these."""
        import torch.distributed._symmetric_memory as symmetric

        try:
            return symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            # PyTorch's allocator keeps what is free.
            torch.cuda.empty_cache()
            return symmetric.empty(nbytes, dtype=torch.uint8, device=device)

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


class _File(NamedTuple):
    """A block in a file of its own, in a folder of its own."""

    folder: tempfile.TemporaryDirectory[str]
    path: str
    memory: torch.Tensor


class SharedArena:
    """An :class:`Arena` of processes on one host's CPUs; everything is done when it is asked for.

    Args:
        comm: The ranks.
        own: This rank's block, from :meth:`block`.
    """

    def __init__(self, comm: ProcessGroupCommunicator, own: _File) -> None:
        self.nbytes, self._comm = own.memory.numel(), comm
        with own.folder:
            told: list[list[str]] = [[] for _ in range(comm.size)]
            dist.all_gather_object(told, [own.path], group=comm.group)
            self._blocks = [own.memory if path == own.path else _mapped(path, self.nbytes) for (path,) in told]
            # Nobody's file goes before all have mapped it.
            self.meet()

    @staticmethod
    def block(nbytes: int) -> _File:
        """A file that other ranks can map; no word with these."""
        folder = tempfile.TemporaryDirectory()
        path = str(Path(folder.name) / "arena")
        return _File(folder, path, _mapped(path, nbytes))

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
    # One that has no memory to spare does not come to where the others' is mapped; where any fails nobody has any.
    own = _tried(partial(_block, nbytes, device))
    if not _all(comm, own is not None, device):
        if isinstance(own, _File):
            own.folder.cleanup()
        return None
    made = _tried(partial(_joined, comm, own, seconds))
    return made if _all(comm, made is not None, device) else None


def _block(nbytes: int, device: torch.device) -> _File | torch.Tensor:
    return SharedArena.block(nbytes) if device.type == "cpu" else SymmetricArena.block(nbytes, device)


def _joined(comm: ProcessGroupCommunicator, own: _File | torch.Tensor | None, seconds: float) -> Arena:
    assert own is not None
    return SharedArena(comm, own) if isinstance(own, _File) else SymmetricArena(comm.group, own, seconds)


def _all(comm: Communicator, able: bool, device: torch.device) -> bool:
    """Whether all ranks are. Collective."""
    told = torch.tensor([able], dtype=torch.int64, device=device)
    return bool(comm.to_host(comm.all_gather(told)).all())


def _tried(make: Callable[[], _Made]) -> _Made | None:
    """What it makes, or ``None`` and a warning where it cannot."""
    try:
        return make()
    except (RuntimeError, OSError) as error:
        logger.warning(
            "ranks of this host cannot read each other's memory, so that tokens or experts travel in messages "
            "(peer_memory=False does not try): %s",
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
