"""Tokens through memory that the ranks of one host share: written where they are served, with no message in between.

Every exchange has one meeting of the ranks, between writing and reading. Two sets of places are used in turns: what is
written in an exchange goes where the one before the last was read from, and all ranks have met since.

For each rank that writes there is a place on each rank: its messages (routing choices) first, then its rows of tokens.
The places of what is told to everyone lie together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from hf_laer.comm.arena import PULLING, Arena, make_arena
from hf_laer.comm.base import Pending, Picked, Sums
from hf_laer.comm.places import Arriving, Placed, Places, Room, aligned
from hf_laer.comm.process_group import ProcessGroupCommunicator
from hf_laer.compute.routing import Leaving

# Where one rank got more tokens than ever, it may get more still.
_GROWTH = 1.25


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
        self._out: tuple[Places, ...] = ()
        self._mine: tuple[Places, ...] = ()
        self._under_way: list[Arriving] = []

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
        # The old memory goes before there is new.
        self._arena, self._out, self._mine = None, (), ()
        nbytes = 2 * self.size * (aligned(self._told_bytes) + room.nbytes)
        # It waits for the device on every rank: nobody writes to the old places any more.
        self._arena = make_arena(self.inner, nbytes, self._device, self._seconds)
        self._refused, self._room = self._arena is None, room
        if self._arena is not None:
            self.use(self._arena)
        else:
            # They would keep the old memory.
            self._out, self._mine = (), ()

    def use(self, arena: Arena) -> None:
        """Lays out the places of all ranks."""
        self._arena, ranks = arena, range(self.size)
        self._out = tuple(Places.of(self._place(turn, on, self.rank) for on in ranks) for turn in (0, 1))
        self._mine = tuple(Places.of(self._place(turn, self.rank, writer) for writer in ranks) for turn in (0, 1))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[…]``, alike on every rank, to ``[size, …]``."""
        nbytes = tensor.numel() * tensor.itemsize
        if self._arena is None or nbytes > self._told_bytes or tensor.numel() == 0:
            return self.inner.all_gather(tensor)
        turn = self._next()
        told = Places.of(self._told(turn, rank, nbytes) for rank in range(self.size))
        told.put(tensor.unsqueeze(0).expand(self.size, *tensor.shape), range(1, self.size + 1))
        self._arena.meet()
        mine = self._told_here(turn, nbytes)
        return mine.view(tensor.dtype).view(self.size, *tensor.shape).clone()

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[q]`` rows to each rank q and returns ``receive[p]`` rows from each rank p."""
        if self._arena is None:
            return self.inner.all_to_all(tensor, send, receive)
        self._check_room(tensor, send, receive)
        turn = self._next()
        self._out[turn].put(tensor, list(itertools.accumulate(send)))
        self._arena.meet()
        return Arriving(self._mine[turn].bytes, receive, tensor, None).wait()

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """As :meth:`all_to_all`, returning at once; of rows that are picked, if they are."""
        if self._arena is None:
            return self.inner.start_all_to_all(tensor, send, receive, picked)
        self._check_room(tensor, send, receive)
        turn = self._next()
        arena, places = self._arena, self._out[turn]
        with arena.aside(arena.mark(), PULLING):
            if picked is None:
                places.put(tensor, list(itertools.accumulate(send)))
            else:
                places.put_picked(tensor, picked, send)
            arena.meet()
            mark = arena.mark()
        return self._expect(Arriving(self._mine[turn].bytes, receive, tensor, lambda: arena.wait(mark)))

    def start_sums(self, sums: Sums, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """As :meth:`start_all_to_all`; sums are formed where they go. Nothing else could run meanwhile."""
        if self._arena is None:
            return self.inner.start_sums(sums, send, receive)
        like = sums.values.new_empty(0, sums.values.shape[1], dtype=sums.dtype)
        self._check_room(like, send, receive)
        turn = self._next()
        self._out[turn].put_sums(sums, like, list(itertools.accumulate(send)))
        self._arena.meet()
        return self._expect(Arriving(self._mine[turn].bytes, receive, like, None))

    def start(
        self, tokens: torch.Tensor, leaving: Leaving, top_k: int, loads: torch.Tensor | None = None
    ) -> Placed | None:
        """See :class:`~hf_laer.comm.base.Communicator`."""
        row_bytes, words = tokens.shape[1] * tokens.itemsize, 0 if loads is None else len(loads) + self.size
        if self._arena is None or words * 8 > self._told_bytes or not self._room.holds(Room(0, top_k, row_bytes)):
            return None
        turn = self._next()
        told = Places.of(self._told(turn, rank, words * 8) for rank in range(self.size) if loads is not None)
        count = tokens.shape[0]
        most = count * leaving.token_rows.shape[1] if count <= self._room.tokens else 0
        self._out[turn].put_all(tokens, leaving, most, self._room.rows_at, loads, told)
        self._arena.meet()
        here = self._told_here(turn, words * 8).view(torch.int64).view(self.size, words) if words else None
        return Placed(self._room, leaving.message, tokens, self._mine[turn].bytes, self._expect, here)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over the ranks."""
        return self.inner.all_reduce(tensor)

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """A copy on the host; where a rank waits for the others."""
        return self.inner.to_host(tensor, meanwhile)

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

    def _expect(self, arriving: Arriving) -> Arriving:
        """Sees to it that it is taken out of its places in time."""
        self._under_way.append(arriving)
        return arriving

    def _settle(self) -> None:
        for arriving in self._under_way:
            arriving.collect()
        self._under_way.clear()

    def _place(self, turn: int, on: int, writer: int) -> torch.Tensor:
        """uint8: on a rank, the place of the rank that writes there."""
        assert self._arena is not None
        half = self._arena.nbytes // 2
        start = turn * half + self.size * aligned(self._told_bytes) + writer * self._room.nbytes
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
