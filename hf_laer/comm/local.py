"""A group of one rank: nothing travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_laer.compute.rows import gather_sum

if TYPE_CHECKING:
    from hf_laer.comm.base import Picked, Sums
    from hf_laer.compute.routing import Leaving


@dataclass(frozen=True)
class Arrived:
    """An exchange that was done before it was asked for."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor

    def summed(self, table: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Sums of its rows."""
        return gather_sum(self.wait(), table, dtype, scale=scale)


class LocalCommunicator:
    """The :class:`~hf_laer.comm.base.Communicator` of one rank."""

    size = 1
    rank = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view with a leading dimension of one."""
        return tensor.unsqueeze(0)

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Arrived:
        """The tensor itself, or some of its rows, arrived."""
        return Arrived(tensor if picked is None else tensor.index_select(0, picked.laid(send)))

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Arrived:
        """As :meth:`start_all_to_all`, once they are formed."""
        return self.start_all_to_all(sums.formed(), send, receive)

    @property
    def nbytes(self) -> int:
        """None."""
        return 0

    @property
    def can_start(self) -> bool:
        """Never."""
        return False

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:
        """Nothing: messages need no room."""

    def start(self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None) -> None:
        """Messages need to know how long they are."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        return tensor.cpu()

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Nothing: there is nobody to differ from."""
