"""Tokens through memory that the ranks of one host share: written where they are served, with no message in between.

Every exchange has one meeting of the ranks, between writing and reading. Two sets of places are used in turns: what is
written in an exchange goes where the one before the last was read from, and all ranks have met since.

For each rank that writes there is a place on each rank: its messages (routing choices) first, then its rows of tokens.
The places of what is told to everyone lie together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_laer.comm.arena import PULLING, Arena, make_arena
from hf_laer.comm.base import Pending, Picked, Sums
from hf_laer.comm.process_group import ProcessGroupCommunicator
from hf_laer.compute.kernels import usable
from hf_laer.compute.routing import Leaving
from hf_laer.compute.rows import gather_sum

_ALIGNMENT = 256
_CHOICE_BYTES = 12
# Where one rank got more tokens than ever, it may get more still.
_GROWTH = 1.25
# More ranks than one launch has numbers for.
MOST_RANKS = 8


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
        return _aligned(self.tokens * self.top_k * _CHOICE_BYTES)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.rows_at + _aligned(self.tokens * self.row_bytes)

    def holds(self, other: Room) -> bool:
        """Whether there is room for the other."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class _Places(NamedTuple):
    """Memory on each rank where this one writes, or on this one where each rank does.

    Args:
        bytes: uint8 each.
        addresses: Of their first bytes.
    """

    bytes: list[torch.Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, parts: Iterable[torch.Tensor]) -> _Places:
        """With their addresses."""
        parts = list(parts)
        return cls(parts, [part.data_ptr() for part in parts])

    def behind(self, nbytes: int) -> _Places:
        """What begins so many bytes behind."""
        return _Places.of(part[nbytes:] for part in self.bytes)


@dataclass(eq=False)
class _Arriving:
    """Rows that are or will be in their places.

    Args:
        peers: Whose.
        places: For each rank, bytes of what it writes here.
        receive: Rows from each rank.
        like: A tensor with such rows.
        mark: After which they are there.
        sent: What is read until then.
    """

    peers: PeerCommunicator
    places: list[torch.Tensor]
    receive: Sequence[int]
    like: torch.Tensor
    mark: object | None
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

        if self.mark is not None:
            self.peers.wait(self.mark)
        first, like = self.places[0], self.like
        stride = (self.places[-1].data_ptr() - first.data_ptr()) // max(len(self.places) - 1, 1) // like.itemsize
        rows = first.view(like.dtype)[: len(first) // (like.shape[1] * like.itemsize) * like.shape[1]]
        ends = list(itertools.accumulate(self.receive))
        found = gather_sum_from(rows.view(-1, like.shape[1]), stride, ends, table, dtype, scale)
        self.places, self.mark = [], None
        del self.like
        return found

    def collect(self) -> None:
        """Takes them out of their places, which the exchange after the next will write to."""
        if self._rows is not None or not self.places:
            return
        if self.mark is not None:
            self.peers.wait(self.mark)
        like, shape = self.like, self.like.shape[1:]
        row_bytes = shape.numel() * like.itemsize
        parts = [
            place[: rows * row_bytes].view(like.dtype).view(rows, *shape)
            for place, rows in zip(self.places, self.receive, strict=True)
        ]
        self._rows, self.places, self.mark = torch.cat(parts), [], None
        del self.like


@dataclass(eq=False)
class Put:
    """Messages and rows that are in their places: see :class:`~hf_laer.comm.base.Gone`."""

    peers: PeerCommunicator
    room: Room
    message: torch.Tensor
    tokens: torch.Tensor
    places: list[torch.Tensor]
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
        return self.peers.expect(_Arriving(self.peers, self.places, receive, self.message, None))

    def rows(self, receive: Sequence[int]) -> Pending:
        """The other ranks' rows for this one."""
        places = [place[self.room.rows_at :] for place in self.places]
        return self.peers.expect(_Arriving(self.peers, places, receive, self.tokens, None))


class PeerCommunicator:
    """The :class:`~hf_laer.comm.base.Communicator` of ranks that share memory.

    Args:
        inner: The same ranks; what is not put travels there, and everything until there is room, and where the ranks
            turn out not to reach each other's memory.
        words: int64 numbers that a rank tells all others at most.
        device: This rank's.
        seconds: See :class:`~hf_laer.comm.arena.SymmetricArena`.
    """

    def __init__(self, inner: ProcessGroupCommunicator, words: int, device: torch.device, seconds: float) -> None:
        self.inner, self.size, self.rank = inner, inner.size, inner.rank
        self._device, self._seconds = device, seconds
        self._told_bytes = words * 8
        self._room = Room()
        self._arena: Arena | None = None
        self._refused = False
        self._turns = itertools.cycle((0, 1))
        # By turn: where this rank writes, and where others write for it.
        self._out: tuple[_Places, ...] = ()
        self._mine: tuple[_Places, ...] = ()
        self._under_way: list[_Arriving] = []

    @property
    def nbytes(self) -> int:
        """Of the shared memory on each rank."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def can_start(self) -> bool:
        """Whether there is memory to put into."""
        return self._arena is not None

    def reserve(self, tokens: int, top_k: int, row_bytes: int) -> None:
        """Makes room for exchanges of so many tokens per rank. Collective; the same numbers on all ranks.

        Args:
            tokens: Of the rank that has most.
            top_k: Choices of each.
            row_bytes: Of one token's row.
        """
        wanted = Room(tokens, top_k, row_bytes)
        if self._refused or self._room.holds(wanted):
            return
        more = int(tokens * _GROWTH) if 0 < self._room.tokens < tokens else tokens
        room = Room(*map(max, self._room, (more, top_k, row_bytes)))
        self._settle()
        if self._arena is not None:
            self._arena.join()
        self._arena = None
        nbytes = 2 * self.size * (_aligned(self._told_bytes) + room.nbytes)
        # It waits for the device on every rank: nobody writes to the old places any more.
        self._arena = make_arena(self.inner, nbytes, self._device, self._seconds)
        self._refused, self._room = self._arena is None, room
        if self._arena is not None:
            self.use(self._arena)

    def use(self, arena: Arena) -> None:
        """Lays out the places of all ranks."""
        self._arena, ranks = arena, range(self.size)
        self._out = tuple(_Places.of(self._place(turn, on, self.rank) for on in ranks) for turn in (0, 1))
        self._mine = tuple(_Places.of(self._place(turn, self.rank, writer) for writer in ranks) for turn in (0, 1))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        nbytes = tensor.numel() * tensor.itemsize
        if self._arena is None or nbytes > self._told_bytes or tensor.numel() == 0:
            return self.inner.all_gather(tensor)
        turn = self._next()
        told = _Places.of(self._told(turn, rank, nbytes) for rank in range(self.size))
        self._put(tensor.unsqueeze(0).expand(self.size, *tensor.shape), range(1, self.size + 1), told)
        self._arena.meet()
        mine = self._told_here(turn, nbytes)
        return mine.view(tensor.dtype).view(self.size, *tensor.shape).clone()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        if self._arena is None:
            return self.inner.all_to_all(tensor, send, receive)
        self._check_room(tensor, send, receive)
        turn = self._next()
        self._put(tensor, list(itertools.accumulate(send)), self._out[turn])
        self._arena.meet()
        return _Arriving(self, self._mine[turn].bytes, receive, tensor, None).wait()

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """As :meth:`all_to_all`, returning at once; of rows that are picked, if they are."""
        if self._arena is None:
            return self.inner.start_all_to_all(tensor, send, receive, picked)
        self._check_room(tensor, send, receive)
        turn = self._next()
        places = self._out[turn]
        with self._arena.aside(self._arena.mark(), PULLING):
            if picked is None or picked.ends is None:
                self._put(tensor, list(itertools.accumulate(send)), places, picked and picked.index)
            else:
                self._put_unknown(tensor, picked.index, picked.ends, sum(send), places)
            self._arena.meet()
            mark = self._arena.mark()
        return self.expect(_Arriving(self, self._mine[turn].bytes, receive, tensor, mark))

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`start_all_to_all`; sums are formed where they go. Nothing else could run meanwhile."""
        if self._arena is None:
            return self.inner.start_sums(sums, send, receive)
        like = sums.values.new_empty(0, sums.values.shape[1], dtype=sums.dtype)
        self._check_room(like, send, receive)
        turn, ends = self._next(), list(itertools.accumulate(send))
        if usable(like):
            from hf_laer.compute.kernels.rows import gather_sum_to

            told = sums.values, sums.table, like, sums.weights, sums.bias, sums.slot
            gather_sum_to(*told, ends, self._out[turn].addresses)
        else:
            self._put(sums.formed(), ends, self._out[turn])
        self._arena.meet()
        return self.expect(_Arriving(self, self._mine[turn].bytes, receive, like, None))

    def start(
        self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None
    ) -> Put | None:
        """See :class:`~hf_laer.comm.base.Communicator`."""
        row_bytes, words = tokens.shape[1] * tokens.itemsize, 0 if loads is None else len(loads) + self.size
        if self._arena is None or words * 8 > self._told_bytes or not self._room.holds(Room(0, top_k, row_bytes)):
            return None
        turn = self._next()
        told = _Places.of(self._told(turn, rank, words * 8) for rank in range(self.size) if loads is not None)
        fits = len(tokens) <= self._room.tokens
        self._put_all(tokens, leaving, loads, len(tokens) * leaving.token_rows.shape[1] if fits else 0, self._out[turn], told)
        self._arena.meet()
        here = self._told_here(turn, words * 8).view(torch.int64).view(self.size, words) if words else None
        return Put(self, self._room, leaving.message, tokens, self._mine[turn].bytes, here)

    def expect(self, arriving: _Arriving) -> _Arriving:
        """Sees to it that it is taken out of its places in time."""
        self._under_way.append(arriving)
        return arriving

    def wait(self, mark: object) -> None:
        """What this rank's device has to do from here on comes after a mark."""
        assert self._arena is not None
        self._arena.wait(mark)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        return self.inner.all_reduce(tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host; where a rank waits for the others."""
        return self.inner.to_host(tensor)

    def agree(self, what: str, parts: Mapping[str, str]) -> None:
        """Nothing: see :mod:`hf_laer.comm.check`."""

    def _check_room(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        nbytes = max(*send, *receive) * row_bytes
        if nbytes > self._room.nbytes:
            raise RuntimeError(f"{nbytes} bytes for one rank, where there is room for {self._room.nbytes}")

    def _next(self) -> int:
        """The places of an exchange that begins; what the one before brought is taken out of its own."""
        self._settle()
        return next(self._turns)

    def _settle(self) -> None:
        for arriving in self._under_way:
            arriving.collect()
        self._under_way.clear()

    def _place(self, turn: int, on: int, writer: int) -> torch.Tensor:
        """uint8: on a rank, the place of the rank that writes there."""
        assert self._arena is not None
        half = self._arena.nbytes // 2
        start = turn * half + self.size * _aligned(self._told_bytes) + writer * self._room.nbytes
        return self._arena.of(on)[start : start + self._room.nbytes]

    def _told(self, turn: int, on: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]``: on a rank, where this one tells it something."""
        assert self._arena is not None
        start = turn * (self._arena.nbytes // 2) + self.rank * nbytes
        return self._arena.of(on)[start : start + nbytes]

    def _told_here(self, turn: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[N * nbytes]``: what all ranks tell this one."""
        assert self._arena is not None
        start = turn * (self._arena.nbytes // 2)
        return self._arena.of(self.rank)[start : start + self.size * nbytes]

    def _put(
        self,
        tensor: torch.Tensor,
        ends: Sequence[int],
        places: _Places,
        index: torch.Tensor | None = None,
    ) -> None:
        """Writes the rows up to each of ``ends`` to the start of each place."""
        if ends[-1] == 0:
            return
        if usable(tensor):
            from hf_laer.compute.kernels.put import put, put_rows

            if index is None:
                put(tensor, ends, places.addresses)
            else:
                put_rows(tensor, index, ends, places.addresses)
            return
        rows = tensor if index is None else tensor[index]
        for start, stop, place in zip([0, *ends], ends, places.bytes, strict=False):
            _write(place, rows[start:stop])

    def _put_unknown(
        self, tensor: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, most: int, places: _Places
    ) -> None:
        """As :meth:`_put`, where only the device knows how many rows there are, at most ``most``."""
        if most == 0:
            return
        if usable(tensor):
            from hf_laer.compute.kernels.put import put_all

            put_all(tensor, index, ends, most, places.addresses, 0)
        else:
            rows = ends[: self.size, -1].tolist()
            self._put(tensor, rows, places, index[: rows[-1]])

    def _put_all(
        self,
        tokens: torch.Tensor,
        leaving: Leaving,
        loads: torch.Tensor | None,
        most: int,
        places: _Places,
        told: _Places,
    ) -> None:
        """Messages and at most ``most`` rows, none of either where that is 0; and what all ranks are told."""
        rows_at, ranks = self._room.rows_at, self.size
        if usable(tokens):
            from hf_laer.compute.kernels.put import put_all

            if most or told.bytes:
                message, bases = leaving.message if most else None, places.addresses
                put_all(tokens, leaving.row_token, leaving.ends, most, bases, rows_at, message, loads, told.addresses)
            return
        ends = leaving.ends[:, -1]
        for place in told.bytes if loads is not None else ():
            _write(place, torch.cat([loads, ends[:ranks]]))
        if most:
            rows, choices = ends[:ranks].tolist(), (ends[ranks : 2 * ranks] - ends[ranks - 1]).tolist()
            self._put(leaving.message, choices, places)
            self._put(tokens, rows, places.behind(rows_at), leaving.row_token[: rows[-1]])


def _write(place: torch.Tensor, rows: torch.Tensor) -> None:
    place[: rows.numel() * rows.itemsize].view(rows.dtype).view(rows.shape).copy_(rows)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
