"""A group of one rank: nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_laer.comm.base import Picked, copied_to_host
from hf_laer.comm.messages import ByMessages, Message


@dataclass(frozen=True)
class Arrived(Message):
    """An exchange that was done before it was asked for."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


class LocalCommunicator(ByMessages):
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

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """A copy on the host."""
        return copied_to_host(tensor, meanwhile)

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Nothing: there is nobody to differ from."""
