"""Places in memory that ranks share: what is in them, how it is written there, and how it is taken out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_laer.comm.base import Pending, Picked, Sums
from hf_laer.compute.kernels import usable
from hf_laer.compute.routing import Leaving
from hf_laer.compute.rows import gather_sum

_ALIGNMENT = 256
_CHOICE_BYTES = 12


def aligned(nbytes: int) -> int:
    """As many bytes, or some more."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Room(NamedTuple):
    """What a rank's place holds.

    Args:
        tokens: Tokens of one rank.
        top_k: Choices of each.
        row_bytes: Of one token's row.
    """

    tokens: int = 0
    top_k: int = 0
    row_bytes: int = 0

    @property
    def rows_at(self) -> int:
        """Bytes of messages, which come first."""
        return aligned(self.tokens * self.top_k * _CHOICE_BYTES)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.rows_at + aligned(self.tokens * self.row_bytes)

    def holds(self, other: Room) -> bool:
        """Whether there is room for the other."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class Places(NamedTuple):
    """Memory on each rank where this one writes, or on this one where each rank does.

    Args:
        bytes: uint8 each.
        addresses: Of their first bytes.
    """

    bytes: list[torch.Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, parts: Iterable[torch.Tensor]) -> Places:
        """With their addresses."""
        parts = list(parts)
        return cls(parts, [part.data_ptr() for part in parts])

    def behind(self, nbytes: int) -> Places:
        """What begins so many bytes behind."""
        return Places.of(part[nbytes:] for part in self.bytes)

    def put(self, tensor: torch.Tensor, ends: Sequence[int], index: torch.Tensor | None = None) -> None:
        """Writes rows, those up to each of ``ends`` to the start of a place; or of rows that ``index`` names."""
        if ends[-1] == 0:
            return
        if usable(tensor):
            from hf_laer.compute.kernels.put import put, put_rows

            if index is None:
                put(tensor, ends, self.addresses)
            else:
                put_rows(tensor, index, ends, self.addresses)
            return
        rows = tensor if index is None else tensor[index]
        for start, stop, place in zip([0, *ends], ends, self.bytes, strict=False):
            _write(place, rows[start:stop])

    def put_picked(self, tensor: torch.Tensor, picked: Picked, send: Sequence[int]) -> None:
        """As :meth:`put`; ``send`` are rows for each place, or the most that there are."""
        if picked.ends is None:
            self.put(tensor, list(itertools.accumulate(send)), picked.rows)
        elif usable(tensor):
            from hf_laer.compute.kernels.put import put_all

            if sum(send):
                put_all(tensor, picked.rows, picked.ends, sum(send), self.addresses, 0)
        else:
            ends = picked.ends[: len(self.bytes), -1].tolist()
            self.put(tensor, ends, picked.rows[: ends[-1]])

    def put_sums(self, sums: Sums, like: torch.Tensor, ends: Sequence[int]) -> None:
        """As :meth:`put`; what is written is formed there, in the dtype of ``like``."""
        if not usable(like):
            self.put(sums.formed(), ends)
            return
        from hf_laer.compute.kernels.rows import gather_sum_to

        told = sums.values, sums.table, like, sums.weights, sums.bias, sums.slot
        gather_sum_to(*told, ends, self.addresses)

    def put_all(
        self, tokens: torch.Tensor, leaving: Leaving, most: int, rows_at: int, loads: torch.Tensor | None, told: Places
    ) -> None:
        """Messages to their start and rows ``rows_at`` bytes behind it; what all ranks are told elsewhere.

        Args:
            tokens: ``[T, H]``.
            leaving: What leaves this rank.
            most: No more rows than this leave; neither rows nor messages where it is 0.
            rows_at: See above.
            loads: int64 ``[E]``, to be told along with where rows to each rank end; or nothing is told.
            told: Where.
        """
        if usable(tokens):
            from hf_laer.compute.kernels.put import put_all

            if most or told.bytes:
                message, of_rows = leaving.message if most else None, (leaving.row_token, leaving.ends, most)
                put_all(tokens, *of_rows, self.addresses, rows_at, message, loads, told.addresses)
            return
        ranks, last = len(self.bytes), leaving.ends[:, -1]
        if loads is not None:
            for place in told.bytes:
                _write(place, torch.cat([loads, last[:ranks]]))
        if most:
            rows, choices = last[:ranks].tolist(), (last[ranks : 2 * ranks] - last[ranks - 1]).tolist()
            self.put(leaving.message, choices)
            self.behind(rows_at).put(tokens, rows, leaving.row_token[: rows[-1]])


@dataclass(eq=False)
class Arriving:
    """Rows that are or will be in their places.

    Args:
        places: For each rank, bytes of what it writes here.
        receive: Rows from each rank.
        like: A tensor with such rows.
        ready: Makes the device wait until they are there, if it must.
    """

    places: list[torch.Tensor]
    receive: Sequence[int]
    like: torch.Tensor
    ready: Callable[[], None] | None
    _rows: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """``[rows, …]``, in memory of their own; once."""
        self.collect()
        assert self._rows is not None, "waited for twice"
        rows, self._rows = self._rows, None
        return rows

    def summed(self, table: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Sums of its rows, where they are."""
        if self._rows is not None or not usable(self.like) or not self.places:
            return gather_sum(self.wait(), table, dtype, scale=scale)
        from hf_laer.compute.kernels.rows import gather_sum_from

        if self.ready is not None:
            self.ready()
        first, like = self.places[0], self.like
        stride = (self.places[-1].data_ptr() - first.data_ptr()) // max(len(self.places) - 1, 1) // like.itemsize
        rows = first.view(like.dtype)[: len(first) // (like.shape[1] * like.itemsize) * like.shape[1]]
        ends = list(itertools.accumulate(self.receive))
        found = gather_sum_from(rows.view(-1, like.shape[1]), stride, ends, table, dtype, scale)
        self.places, self.ready = [], None
        del self.like
        return found

    def collect(self) -> None:
        """Takes them out of their places, which the exchange after the next will write to."""
        if self._rows is not None or not self.places:
            return
        if self.ready is not None:
            self.ready()
        like, shape = self.like, self.like.shape[1:]
        row_bytes = shape.numel() * like.itemsize
        parts = [
            place[: rows * row_bytes].view(like.dtype).view(rows, *shape)
            for place, rows in zip(self.places, self.receive, strict=True)
        ]
        self._rows, self.places, self.ready = torch.cat(parts), [], None
        del self.like


@dataclass(eq=False)
class Placed:
    """Messages and rows that are in their places: see :class:`~hf_laer.comm.base.Gone`.

    Args:
        room: What each rank's place holds.
        message: Something like the messages.
        tokens: Something like the rows.
        places: For each rank, bytes of what it writes here.
        expect: Told of what is still to be taken out of them.
    """

    room: Room
    message: torch.Tensor
    tokens: torch.Tensor
    places: list[torch.Tensor]
    expect: Callable[[Arriving], Arriving]
    _told: torch.Tensor | None

    @property
    def told(self) -> torch.Tensor:
        """See :class:`~hf_laer.comm.base.Gone`."""
        assert self._told is not None
        return self._told

    def holds(self, most_tokens: int) -> bool:
        """Whether every rank's tokens had room."""
        return most_tokens <= self.room.tokens

    def messages(self, receive: Sequence[int]) -> Pending:
        """What of the other ranks' choices is for this one."""
        return self.expect(Arriving(self.places, receive, self.message, None))

    def rows(self, receive: Sequence[int]) -> Pending:
        """The other ranks' rows for this one."""
        places = [place[self.room.rows_at :] for place in self.places]
        return self.expect(Arriving(places, receive, self.tokens, None))


def _write(place: torch.Tensor, rows: torch.Tensor) -> None:
    place[: rows.numel() * rows.itemsize].view(rows.dtype).view(rows.shape).copy_(rows)
