"""A group of ranks over a torch process group (NCCL or gloo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class PendingWork:
    """A collective under way and the buffers that it reads and writes."""

    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor
    label: str

    def wait(self) -> torch.Tensor:
        """The received tensor."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.label} failed: {error}") from error
        return self.received


class ProcessGroupCommunicator:
    """The :class:`~hf_laer.comm.base.Communicator` of a process group.

    Args:
        group: The process group; only hf_laer uses it, so that tokens and weights queue behind nobody else.
        purpose: What travels on it; errors name it.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self.group = group
        self.purpose = purpose
        self.size = group.size()
        self.rank = group.rank()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        # The flat view: gloo wants input and output of equal rank.
        work = _all_gather(gathered.view(-1), tensor.contiguous().view(-1), group=self.group, async_op=True)
        return self._pending(work, gathered, tensor, "all-gather").wait()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        return self.start_all_to_all(tensor, send, receive).wait()

    def start_all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> PendingWork:
        """As :meth:`all_to_all`, returning at once."""
        tensor = tensor.contiguous()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        work = dist.all_to_all_single(received, tensor, list(receive), list(send), group=self.group, async_op=True)
        return self._pending(work, received, tensor, "all-to-all")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return self._pending(work, tensor, tensor, "all-reduce").wait()

    def _pending(self, work: dist.Work, received: torch.Tensor, sent: torch.Tensor, kind: str) -> PendingWork:
        label = f"hf_laer {kind} of {self.purpose} (rank {self.rank} of {self.size})"
        return PendingWork(work, received, sent, label)
