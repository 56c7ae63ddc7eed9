"""What is the same for all ranks that send each other messages, which need to know how long these are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_laer.comm.base import Pending, Picked, Sums
from hf_laer.compute.rows import gather_sum

if TYPE_CHECKING:
    from hf_laer.compute.routing import Leaving


class Message(ABC):
    """A :class:`~hf_laer.comm.base.Pending` that brings a tensor."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """The received tensor."""

    def summed(self, table: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Sums of its rows."""
        return gather_sum(self.wait(), table, dtype, scale=scale)


class ByMessages(ABC):
    """The part of a :class:`~hf_laer.comm.base.Communicator` that messages leave no choice in."""

    nbytes = 0
    can_start = False

    @abstractmethod
    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """See :class:`~hf_laer.comm.base.Communicator`."""

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`start_all_to_all`, once they are formed."""
        return self.start_all_to_all(sums.formed(), send, receive)

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:  # noqa: B027 (nothing is right for all)
        """Nothing: messages need no room."""

    def start(  # noqa: B027 (likewise)
        self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None
    ) -> None:
        """Nothing: nobody knows how long they would be."""
