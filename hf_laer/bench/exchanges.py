"""How long a rank's products wait for tokens: a communicator that takes the time of another one's exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_laer.comm.base import Communicator, Gone, Pending, Picked, Sums
from hf_laer.comm.messages import Message
from hf_laer.compute.routing import Leaving


class Mark:
    """A moment on the current stream, or on the host where there is no GPU."""

    def __init__(self, is_cuda: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if is_cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def until(self, other: Mark) -> float:
        """Milliseconds; the device must be done."""
        if self._event is not None and other._event is not None:
            return float(self._event.elapsed_time(other._event))
        return (other._seconds - self._seconds) * 1e3


@dataclass(frozen=True)
class _Timed(Message):
    pending: Pending
    marks: list[tuple[Mark, Mark]]
    is_cuda: bool

    def wait(self) -> torch.Tensor:
        begin = Mark(self.is_cuda)
        arrived = self.pending.wait()
        self.marks.append((begin, Mark(self.is_cuda)))
        return arrived


class Stopwatch:
    """Another :class:`~hf_laer.comm.base.Communicator` whose all-to-alls are timed.

    An exchange counts from when the stream comes to it until it goes on: what is waited for, the other ranks' lateness
    included, and nothing that happens meanwhile.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.size, self.rank = inner, inner.size, inner.rank
        self._marks: list[tuple[Mark, Mark]] = []

    def milliseconds(self, calls: int = 2) -> float:
        """Of the mean call since the last time, the first of ``calls`` like ones left out; waits for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks = self._marks[len(self._marks) // calls :]
        self._marks.clear()
        return sum(begin.until(end) for begin, end in marks) / (calls - 1)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other's."""
        return self.inner.all_gather(tensor)

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """The other's, timed."""
        begin = Mark(tensor.is_cuda)
        arrived = self.inner.all_to_all(tensor, send, receive)
        self._marks.append((begin, Mark(tensor.is_cuda)))
        return arrived

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """The other's; its wait is timed."""
        return _Timed(self.inner.start_all_to_all(tensor, send, receive, picked), self._marks, tensor.is_cuda)

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`start_all_to_all`, once they are formed, so that they are not timed."""
        return self.start_all_to_all(sums.formed(), send, receive)

    @property
    def nbytes(self) -> int:
        """The other's."""
        return self.inner.nbytes

    @property
    def can_start(self) -> bool:
        """The other's."""
        return self.inner.can_start

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:
        """The other's."""
        self.inner.reserve(tokens, top_k, row_bytes)

    def start(
        self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None
    ) -> Gone | None:
        """The other's, which is not timed: nothing else could run meanwhile."""
        return self.inner.start(tokens, leaving, top_k, loads)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other's."""
        return self.inner.all_reduce(tensor)

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """The other's."""
        return self.inner.to_host(tensor, meanwhile)

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """The other's."""
        self.inner.agree(what, parts)
