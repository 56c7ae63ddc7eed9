"""A group of ranks over a torch process group (NCCL or gloo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hf_laer.comm.base import Picked, copied_to_host
from hf_laer.comm.messages import ByMessages, Message
from hf_laer.comm.watch import Watch, Where

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class PendingWork(Message):
    """A collective under way and the buffers that it reads and writes, which it lets go of once it is waited for."""

    work: dist.Work
    buffers: tuple[torch.Tensor, torch.Tensor] | None
    collective: str
    where: Where
    watch: Watch

    def wait(self) -> torch.Tensor:
        """The received tensor, once.

        Raises:
            CollectiveError: It failed or timed out.
        """
        assert self.buffers is not None, "waited for twice"
        with self.watch.waits(self.collective, self.where):
            self.work.wait()
        (received, _), self.buffers = self.buffers, None
        del self.work  # it holds the buffers too
        return received


class ProcessGroupCommunicator(ByMessages):
    """The :class:`~hf_laer.comm.base.Communicator` of a process group.

    Args:
        group: The process group; only hf_laer uses it, so that tokens and weights queue behind nobody else.
        purpose: What travels on it; errors name it.
        watch: Where this rank is; errors say it.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str, watch: Watch) -> None:
        self.group = group
        self.purpose = purpose
        self.size = group.size()
        self.rank = group.rank()
        self.watch = watch
        # As errors name them; not put together at each call.
        self._all_gather, self._all_to_all = f"all-gather of {purpose}", f"all-to-all of {purpose}"
        self._all_reduce, self._arrival = f"all-reduce of {purpose}", f"{purpose} to arrive"

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        # The flat view: gloo wants input and output of equal rank.
        into, flat = gathered.view(-1), tensor.contiguous().view(-1)
        start = partial(_all_gather, into, flat, group=self.group, async_op=True)
        return self._start(self._all_gather, start, gathered, tensor).wait()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        return self.start_all_to_all(tensor, send, receive).wait()

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> PendingWork:
        """As :meth:`all_to_all`, returning at once; of rows that are picked, if they are."""
        tensor = tensor.contiguous() if picked is None else tensor.index_select(0, picked.laid(send))
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        start = partial(
            dist.all_to_all_single, received, tensor, list(receive), list(send), group=self.group, async_op=True
        )
        return self._start(self._all_to_all, start, received, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        start = partial(dist.all_reduce, tensor, group=self.group, async_op=True)
        return self._start(self._all_reduce, start, tensor, tensor).wait()

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """A copy on the host; under NCCL this is where a rank waits for the others."""
        with self.watch.waits(self._arrival, self.watch.where):
            return copied_to_host(tensor, meanwhile)

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Nothing: see :mod:`hf_laer.comm.check`."""

    def _start(
        self, collective: str, start: Callable[[], dist.Work], received: torch.Tensor, sent: torch.Tensor
    ) -> PendingWork:
        where = self.watch.where
        with self.watch.waits(collective, where):
            work = start()
        return PendingWork(work, (received, sent), collective, where, self.watch)
