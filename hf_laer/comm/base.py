"""What the engine asks of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hf_laer.compute.rows import gather_sum

if TYPE_CHECKING:
    from hf_laer.compute.routing import Leaving


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> torch.Tensor:
        """The received tensor; the current stream (or the host, for a CPU group) waits for it."""
        ...

    def summed(self, table: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Its rows, gathered and summed: see :func:`hf_laer.compute.rows.gather_sum`."""
        ...


class Gone(Protocol):
    """Messages and rows that have set out, though nobody knew how many."""

    @property
    def told(self) -> torch.Tensor:
        """int64 ``[size, E + size]``: if they were told, each rank's loads and where its rows for each rank end."""
        ...

    def holds(self, most_tokens: int) -> bool:
        """Whether all of every rank's set out, the largest of which had so many tokens; the same answer on all."""
        ...

    def messages(self, receive: Sequence[int]) -> Pending:
        """int32 ``[A, 3]``: ``receive[p]`` choices from each rank p."""
        ...

    def rows(self, receive: Sequence[int]) -> Pending:
        """``[R, H]``: ``receive[p]`` rows from each rank p, the last of which may mean nothing."""
        ...


class Picked(NamedTuple):
    """Which rows of a tensor leave.

    Args:
        rows: int64 ``[at least R]``, those to each rank one after the other.
        ends: ``[at least N, B]``, whose last column says where those to each rank end, if the host does not know.
    """

    rows: torch.Tensor
    ends: torch.Tensor | None = None

    def laid(self, send: Sequence[int]) -> torch.Tensor:
        """int64 ``[sum(send)]``: the rows as messages carry them.

        Args:
            send: Rows to each rank, or the most that there are; what is sent beyond those that leave is one of them.
        """
        if self.ends is None:
            return self.rows
        total, device = sum(send), self.rows.device
        sizes, stops = torch.tensor(send, device=device), self.ends[: len(send), -1].long()
        starts = stops.roll(1)
        starts[0] = 0
        # From a row's place among as many as there may be to its place among those that there are.
        shift = (starts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes, output_size=total)
        return self.rows[(torch.arange(total, device=device) + shift).minimum((stops[-1:] - 1).clamp(min=0))]


class Sums(NamedTuple):
    """Arguments of :func:`hf_laer.compute.rows.gather_sum`."""

    values: torch.Tensor
    table: torch.Tensor
    dtype: torch.dtype
    weights: torch.Tensor
    bias: torch.Tensor | None
    slot: torch.Tensor

    def formed(self) -> torch.Tensor:
        """``[R, H]``."""
        return gather_sum(self.values, self.table, self.dtype, weights=self.weights, bias=self.bias, slot=self.slot)


class Communicator(Protocol):
    """A group of ranks. Every rank of it makes the same calls in the same order, whatever its sizes.

    Attributes:
        size: Ranks in the group.
        rank: This rank's place in the group.
        nbytes: Of each rank's memory that the others write to.
        can_start: Whether :meth:`start` works for what room has been reserved for; the same on all ranks.

    Raises:
        CollectiveError: Every method, where the other ranks do not take part.
    """

    size: int
    rank: int

    @property
    def nbytes(self) -> int:
        """See above."""
        ...

    @property
    def can_start(self) -> bool:
        """See above."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        ...

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` consecutive rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        ...

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """As :meth:`all_to_all`, returning at once; of rows that are picked, if they are."""
        ...

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`start_all_to_all`, of sums that are still to be formed."""
        ...

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:
        """Told before exchanges of rows of so many bytes, and of choices; the same numbers on all ranks.

        Args:
            tokens: Of the rank that has most.
            top_k: Choices of each.
            row_bytes: Of one token's row.
        """
        ...

    def start(
        self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None
    ) -> Gone | None:
        """Sends messages and rows though no rank knows how many come, where they can travel so; alike on all ranks.

        Args:
            tokens: ``[T, H]``.
            leaving: What leaves this rank.
            top_k: K.
            loads: int64 ``[E]``, to be told to all along with it.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        ...

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """A copy on the host of what was received, or follows from it.

        Args:
            tensor: It.
            meanwhile: See :func:`copied_to_host`.
        """
        ...

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Under ``check_collectives``, compares ``parts`` over the ranks; else does nothing."""
        ...


def copied_to_host(tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
    """A copy on the host, for which it waits.

    Args:
        tensor: What is copied.
        meanwhile: Gives the device more to do, for which the host does not wait.
    """
    if tensor.device.type != "cuda":
        if meanwhile is not None:
            meanwhile()
        return tensor.cpu()
    # Pinned: into other memory the copy would not return before it is done.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    there = torch.cuda.Event()
    copy.copy_(tensor, non_blocking=True)
    there.record()
    if meanwhile is not None:
        meanwhile()
    there.synchronize()
    return copy
