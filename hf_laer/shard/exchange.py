"""Unshard and reshard: blocks of expert parameters travel to the slots that need them, gradients travel back.

Both directions follow from two tables that all ranks hold: which experts sit in which rank's slots, and which block
of each parameter lives on which rank. From home p to rank q goes, of every parameter, p's rows of those experts in
q's slots that p has; everything for one pair is packed into one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from hf_laer.comm.base import Communicator, Pending
from hf_laer.shard.home import Home, Layout, Part

SlotTable = tuple[tuple[int, ...], ...]
# Over 1,000 ranks one takes 100 KB: room for the tables of a pass, and not for a thousand.
TABLES = 256


class Span(NamedTuple):
    """Experts that are consecutive both in a home's block and in a rank's slots.

    Args:
        expert: The first one's position in the block.
        slot: Its slot.
        at: Its position among all that travel.
        size: How many.
    """

    expert: int
    slot: int
    at: int
    size: int


@dataclass(frozen=True)
class Piece:
    """What travels of one parameter between a home and a rank's slots.

    Args:
        runs: The experts.
        rows: The home's rows.
        shape: ``(experts, len(rows), …)``.
    """

    runs: list[Span]
    rows: range
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return math.prod(self.shape)

    def of_home(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Views of a home's block, run by run."""
        return [block[run.expert : run.expert + run.size] for run in self.runs]

    def of_slots(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Views of a rank's slots, run by run."""
        rows = slice(self.rows.start, self.rows.stop)
        return [slots[run.slot : run.slot + run.size, rows] for run in self.runs]

    def of_message(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Views of what travels, ``[numel]``, run by run."""
        whole = message.view(self.shape)
        return [whole[run.at : run.at + run.size] for run in self.runs]


@lru_cache(maxsize=4096)
def piece(layout: Layout, home: int, held: tuple[int, ...]) -> Piece:
    """The piece between the home on rank ``home`` and slots that hold the experts ``held``."""
    owned, rows = layout.experts[home], layout.rows[home]
    runs: list[Span] = []
    count = 0
    for slot, expert in enumerate(held):
        if expert not in owned:
            continue
        position, last = expert - owned.start, runs[-1] if runs else None
        if last and last.expert + last.size == position and last.slot + last.size == slot:
            runs[-1] = last._replace(size=last.size + 1)
        else:
            runs.append(Span(position, slot, count, 1))
        count += 1
    return Piece(runs if len(rows) else [], rows, (count, len(rows), *layout.shape[2:]))


def is_local(homes: dict[str, Home], table: SlotTable) -> bool:
    """Whether every rank finds all its slots' experts whole in its own home; the same answer on all ranks."""
    return all(_is_local(home.layout, table) for home in homes.values())


@lru_cache(maxsize=TABLES)
def _is_local(layout: Layout, table: SlotTable) -> bool:
    return all(
        expert in layout.experts[rank] and len(layout.rows[rank]) == layout.shape[1]
        for rank, held in enumerate(table)
        for expert in held
    )


def beyond_own(homes: dict[str, Home], table: SlotTable) -> SlotTable | None:
    """What the slots hold beyond each rank's own experts.

    ``None`` unless every rank's slots start with its own experts and its home holds them whole: then these are used
    where they live. The same answer on all ranks.
    """
    return _beyond_own(next(iter(homes.values())).layout, table)


@lru_cache(maxsize=TABLES)
def _beyond_own(layout: Layout, table: SlotTable) -> SlotTable | None:
    own = [tuple(experts) for experts in layout.experts]
    whole = all(len(rows) == layout.shape[1] for rows in layout.rows)
    if not whole or any(held[: len(mine)] != mine for held, mine in zip(table, own, strict=True)):
        return None
    return tuple(held[len(mine) :] for held, mine in zip(table, own, strict=True))


def forget_tables() -> None:
    """Drops what is kept of slot tables seen; it is bounded, but may grow for thousands of steps until it is full."""
    for kept in (piece, _is_local, _beyond_own):
        kept.cache_clear()


@dataclass
class Unshard:
    """Experts on their way to this rank's slots.

    Args:
        homes: The layer's parameters by name.
        blocks: Name to this rank's block, in the dtype and on the device of the slots.
        table: Per rank of ``comm``, the experts that are fetched into its slots.
        comm: The ranks over which the homes are sharded.
        pending: What arrives from other ranks, if anything travels.
    """

    homes: dict[str, Home]
    blocks: dict[str, torch.Tensor]
    table: SlotTable
    comm: Communicator
    pending: Pending | None

    def fill(self, slots: dict[str, torch.Tensor]) -> None:
        """Waits, and writes the experts into ``slots``: name to ``[S, D, …]``, S the experts of this rank's row."""
        me = self.comm.rank
        for name, home in self.homes.items():
            own = piece(home.layout, me, self.table[me])
            _copy(own.of_slots(slots[name]), own.of_home(self.blocks[name]))
        if self.pending is not None:
            coming = [
                [(name, piece(h.layout, p, self.table[me])) for name, h in self.homes.items()]
                for p in range(self.comm.size)
            ]
            for name, p, part in _unpack(coming, me, self.pending.wait()):
                _copy(p.of_slots(slots[name]), part)


def start_unshard(
    homes: dict[str, Home], table: SlotTable, comm: Communicator, dtype: torch.dtype, device: torch.device
) -> Unshard:
    """Sends experts from their homes to the slots of ``table``.

    Args:
        homes: The layer's parameters by name.
        table: Per rank of ``comm``, the experts to fetch.
        comm: The ranks over which the homes are sharded.
        dtype: Dtype in which weights travel and are used.
        device: Where the slots are.
    """
    me, pending = comm.rank, None
    blocks = {name: home.local.to(device, dtype, non_blocking=True) for name, home in homes.items()}
    if not is_local(homes, table):
        leaving = [[(name, piece(h.layout, me, held)) for name, h in homes.items()] for held in table]
        coming = [[(name, piece(h.layout, p, table[me])) for name, h in homes.items()] for p in range(comm.size)]
        message = _pack(leaving, me, blocks, Piece.of_home)
        pending = comm.start_all_to_all(message, _sizes(leaving, me), _sizes(coming, me))
    return Unshard(homes, blocks, table, comm, pending)


@dataclass
class Reshard:
    """Weight gradients on their way home; :meth:`finish` adds them into the parameters' ``.grad``.

    Args:
        homes: The trained parameters by name.
        own: Name to gradients of this rank's block that were made where it lives, if they were.
        grads: Name to ``[S, D, …]``, the gradients of the slots in ``table``.
        table: Per rank of ``comm``, the experts in these slots.
        comm: The ranks over which the homes are sharded.
        replicas: Ranks that hold the same blocks (HSDP).
        pending: What arrives from other ranks, if anything travels.
        scale: Factor of the sum over ranks and replicas.
    """

    homes: dict[str, Home]
    own: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    table: SlotTable
    comm: Communicator
    replicas: Communicator
    pending: Pending | None
    scale: float

    def finish(self) -> None:
        """Sums in float32, this rank's part first, then in the order of ranks; scales once; accumulates."""
        me = self.comm.rank
        parts: dict[str, list[Part]] = {}
        for name, home in self.homes.items():
            here = piece(home.layout, me, self.table[me])
            parts[name] = [(0, self.own.pop(name))] if name in self.own else []
            parts[name] += _parts(here, here.of_slots(self.grads.pop(name)))
        if self.pending is not None:
            coming = [[(n, piece(h.layout, me, held)) for n, h in self.homes.items()] for held in self.table]
            for name, p, views in _unpack(coming, me, self.pending.wait()):
                parts[name] += _parts(p, views)
        for name, home in self.homes.items():
            home.accumulate(self._over_replicas(home, parts.pop(name)), self.scale)

    def _over_replicas(self, home: Home, parts: list[Part]) -> list[Part]:
        """The sum over the ranks that hold the same block, in float32 (HSDP)."""
        if self.replicas.size == 1:
            return parts
        device = parts[0][1].device if parts else home.local.device
        total = torch.zeros(home.layout.block_shape(self.comm.rank), dtype=torch.float32, device=device)
        for start, part in parts:
            total[start : start + len(part)] += part
        return [(0, self.replicas.all_reduce(total))]


def _parts(p: Piece, views: list[torch.Tensor]) -> list[Part]:
    return [(run.expert, view) for run, view in zip(p.runs, views, strict=True)]


def start_reshard(
    homes: dict[str, Home],
    stacks: dict[str, tuple[torch.Tensor, ...]],
    table: SlotTable,
    comm: Communicator,
    replicas: Communicator,
    dtype: torch.dtype,
    scale: float,
) -> Reshard:
    """Sends the gradients of this rank's slots home.

    Args:
        homes: The trained parameters by name.
        stacks: Name to gradients, stacked as the weights were: own experts apart where :func:`beyond_own` says so.
        table: Per rank of ``comm``, the experts in its slots.
        comm: The ranks over which the homes are sharded.
        replicas: Ranks that hold the same blocks (HSDP).
        dtype: Dtype in which gradients travel.
        scale: Factor of their sum over ranks and replicas.
    """
    me, pending, own = comm.rank, None, {}
    beyond = beyond_own(homes, table)
    if beyond is not None:
        table, own = beyond, {name: stack[0] for name, stack in stacks.items()}
    grads = {name: stack[-1] for name, stack in stacks.items()}
    if not is_local(homes, table):
        leaving = [[(name, piece(h.layout, p, table[me])) for name, h in homes.items()] for p in range(comm.size)]
        coming = [[(name, piece(h.layout, me, held)) for name, h in homes.items()] for held in table]
        message = _pack(leaving, me, grads, Piece.of_slots, dtype)
        pending = comm.start_all_to_all(message, _sizes(leaving, me), _sizes(coming, me))
    return Reshard(homes, own, grads, table, comm, replicas, pending, scale)


Pieces = list[list[tuple[str, Piece]]]


def _pack(
    pieces: Pieces,
    me: int,
    tensors: dict[str, torch.Tensor],
    view: Callable[[Piece, torch.Tensor], list[torch.Tensor]],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One message to every other rank, one after the other: ``[elements]``, in ``dtype`` if that is given."""
    like = next(iter(tensors.values()))
    message = torch.empty(sum(_sizes(pieces, me)), dtype=dtype or like.dtype, device=like.device)
    for name, p, part in _unpack(pieces, me, message):
        _copy(part, view(p, tensors[name]))
    return message


def _unpack(pieces: Pieces, me: int, message: torch.Tensor) -> Iterator[tuple[str, Piece, list[torch.Tensor]]]:
    """The views of a message from or to every other rank, by name and piece."""
    at = 0
    for rank, of_rank in enumerate(pieces):
        for name, p in of_rank if rank != me else ():
            yield name, p, p.of_message(message[at : at + p.numel])
            at += p.numel


def _copy(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    for target, source in zip(into, out_of, strict=True):
        target.copy_(source)


def _sizes(pieces: Pieces, me: int) -> list[int]:
    return [0 if rank == me else sum(p.numel for _, p in of_rank) for rank, of_rank in enumerate(pieces)]
