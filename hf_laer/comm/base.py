"""What the engine asks of a group of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from hf_laer.compute.routing import Leaving


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> torch.Tensor:
        """The received tensor; the current stream (or the host, for a CPU group) waits for it."""
        ...


class Ahead(Protocol):
    """Messages and rows that set out before the loads were known, as for a plan that leaves tokens with their owners.

    Attributes:
        told: int64 ``[size, E + size]``: of each rank, its loads, and where its rows for each rank end.
    """

    told: torch.Tensor

    def holds(self, most_tokens: int) -> bool:
        """Whether all of every rank's set out, the largest of which had so many tokens; the same answer on all."""
        ...

    def messages(self, receive: Sequence[int]) -> Pending:
        """int32 ``[A, 3]``: ``receive[p]`` choices from each rank p."""
        ...

    def rows(self, receive: Sequence[int]) -> Pending:
        """``[R, H]``: ``receive[p]`` rows from each rank p."""
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

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], index: torch.Tensor | None = None
    ) -> Pending:
        """As :meth:`all_to_all`, returning at once; of the rows that ``index`` names, if it is given."""
        ...

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:
        """Told before exchanges of rows of so many bytes, and of choices; the same numbers on all ranks.

        Args:
            tokens: Of the rank that has most.
            top_k: Choices of each.
            row_bytes: Of one token's row.
        """
        ...

    def start_ahead(self, loads: torch.Tensor, leaving: Leaving, tokens: torch.Tensor, top_k: int) -> Ahead | None:
        """Tells loads int64 ``[E]`` and sends what leaves at once, where tokens can travel so; the same on all ranks.

        Args:
            loads: This rank's.
            leaving: What leaves it if every token goes to its experts' owners.
            tokens: ``[T, H]``.
            top_k: K.
        """
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
