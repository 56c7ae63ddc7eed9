"""What the engine asks of a group of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> torch.Tensor:
        """The received tensor; the current stream (or the host, for a CPU group) waits for it."""
        ...


class Communicator(Protocol):
    """A group of ranks. Every rank of it makes the same calls in the same order, whatever its sizes.

    Attributes:
        size: Ranks in the group.
        rank: This rank's place in the group.

    Raises:
        CollectiveError: Every method, where the other ranks do not take part.
    """

    size: int
    rank: int

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        ...

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` consecutive rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        ...

    def start_all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`all_to_all`, returning at once."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host of what was received, or follows from it."""
        ...

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Under ``check_collectives``, compares ``parts`` over the ranks; else does nothing."""
        ...
