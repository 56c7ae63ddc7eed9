"""Unshard and reshard: blocks of expert parameters travel to the slots that need them, gradients travel back.

Both directions follow from two tables that all ranks hold: which experts sit in which rank's slots, and which block
of each parameter lives on which rank. From home p to rank q goes, of every parameter, p's rows of those experts in
q's slots that p has; everything for one pair is packed into one message. Between nodes a part goes through a rank in
between (:mod:`hf_laer.shard.nodes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from hf_laer.comm.base import Communicator, Pending
from hf_laer.compute.segments import Blocks, Part, add_parts, copy_all
from hf_laer.shard.home import Home, Layout
from hf_laer.shard.nodes import Nodes, SlotTable, Sources, sources

# Over 1,000 ranks one takes 100 KB: room for the tables of a pass, and not for a thousand.
TABLES = 256


@dataclass(frozen=True, eq=False)
class Piece:
    """What travels of one parameter between a home and a rank's slots.

    Args:
        experts: int64 ``[b]``, positions in the home's block, or in the slots of the rank that passes them on.
        slots: int64 ``[b]``, their slots.
        rows: The home's rows.
        shape: ``(b, len(rows), …)``.
    """

    experts: np.ndarray
    slots: np.ndarray
    rows: range
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return math.prod(self.shape)

    def of_home(self, block: torch.Tensor) -> Blocks:
        """Of a home's block."""
        return Blocks(block, self.experts, range(len(self.rows)))

    def of_giver(self, slots: torch.Tensor) -> Blocks:
        """Of the slots of a rank that passes them on."""
        return Blocks(slots, self.experts, self.rows)

    def of_slots(self, slots: torch.Tensor) -> Blocks:
        """Of a rank's slots."""
        return Blocks(slots, self.slots, self.rows)

    def of_message(self, message: torch.Tensor) -> Blocks:
        """What travels, ``[numel]``."""
        return Blocks.whole(message.view(self.shape))


@lru_cache(maxsize=4096)
def piece(layout: Layout, home: int, held: tuple[int, ...]) -> Piece:
    """The piece between the home on rank ``home`` and slots that hold the experts ``held``."""
    owned, rows = layout.experts[home], layout.rows[home]
    there = [(expert - owned.start, slot) for slot, expert in enumerate(held) if expert in owned]
    return _piece(there if len(rows) else [], layout, home)


def _piece(places: Sequence[tuple[int, int]], layout: Layout, home: int) -> Piece:
    """Of experts by where they come from and their slots."""
    experts, slots = np.array(places, np.int64).reshape(-1, 2).T
    rows = layout.rows[home]
    return Piece(experts, slots, rows, (len(places), len(rows), *layout.shape[2:]))


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
    for kept in (piece, _is_local, _beyond_own, sources):
        kept.cache_clear()


@dataclass
class Unshard:
    """Experts on their way to this rank's slots.

    Args:
        homes: The layer's parameters by name.
        blocks: Name to this rank's block on the device of the slots; in their dtype, where it is used as it is.
        table: Per rank of ``comm``, the experts that are fetched into its slots.
        comm: The ranks over which the homes are sharded.
        pending: What arrives from other ranks, if anything travels.
        before: Per rank, the experts in its slots before these, if there are any.
        nodes: Where there are several.
    """

    homes: dict[str, Home]
    blocks: dict[str, torch.Tensor]
    table: SlotTable
    comm: Communicator
    pending: Pending | None
    before: SlotTable = ()
    nodes: Nodes | None = None

    def fill(self, slots: dict[str, torch.Tensor]) -> None:
        """Waits, and writes the experts behind those that are there: into name to ``[S, D, …]``, all of its slots."""
        me, found = self.comm.rank, _sources(self.table, self.before, self.nodes)
        start = len(self.before[me]) if self.before else 0
        mine = {name: stack[start : start + len(self.table[me])] for name, stack in slots.items()}
        copies = _Copies()
        for name, home in self.homes.items():
            own = piece(home.layout, me, self.table[me])
            copies.add(own.of_slots(mine[name]), own.of_home(self.blocks[name]))
        if self.pending is not None:
            for name, p, part in _unpack(_from_homes(self.homes, found, me), me, self.pending.wait()):
                copies.add(p.of_slots(mine[name]), part)
        copies.make()
        if self.pending is not None:
            self._pass_on(found, slots)

    def wait(self) -> None:
        """Until what travels has arrived: the buffers of an exchange must outlive it."""
        if self.pending is not None:
            self.pending.wait()

    def _pass_on(self, found: Sources, slots: dict[str, torch.Tensor]) -> None:
        """What this node got once goes to its other ranks."""
        nodes, size = self.nodes, self.comm.size
        if nodes is None or not _passes(self.homes, found, nodes, self.comm):
            return
        rows = [(*before, *row) for before, row in zip(self.before or ((),) * size, self.table, strict=True)]
        here, me = nodes.ranks(self.comm.rank, size), self.comm.rank

        def between(giver: int, taker: int) -> list[tuple[str, Piece]]:
            return [
                (name, _piece_at(home.layout, at, experts, rows[giver], rows[taker]))
                for name, home in self.homes.items()
                for at, experts in (found.passed(home.layout, giver, taker).items() if giver != taker else ())
            ]

        leaving, coming = [between(me, other) for other in here], [between(other, me) for other in here]
        message, own = _pack(leaving, me - here.start, slots, Piece.of_giver), me - here.start
        arrived = nodes.comm.all_to_all(message, _sizes(leaving, own), _sizes(coming, own))
        copies = _Copies()
        for name, p, part in _unpack(coming, own, arrived):
            copies.add(p.of_slots(slots[name]), part)
        copies.make()


def start_unshard(
    homes: dict[str, Home],
    table: SlotTable,
    comm: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    before: SlotTable = (),
    nodes: Nodes | None = None,
    whole: bool = False,
) -> Unshard:
    """Sends experts from their homes to the slots of ``table``.

    Args:
        homes: The layer's parameters by name.
        table: Per rank of ``comm``, the experts to fetch.
        comm: The ranks over which the homes are sharded.
        dtype: Dtype in which weights travel and are used.
        device: Where the slots are.
        before: Per rank of ``comm``, the experts that its slots will hold by then, if any.
        nodes: Where there are several.
        whole: This rank's block is used where it lives too: it is needed in ``dtype``, and is converted once.
    """
    me, pending = comm.rank, None
    blocks = {name: home.local.to(device, dtype if whole else None, non_blocking=True) for name, home in homes.items()}
    if not is_local(homes, table):
        found = _sources(table, before, nodes)
        leaving, coming = _to_slots(homes, found, me), _from_homes(homes, found, me)
        message = _pack(leaving, me, blocks, Piece.of_home, dtype)
        pending = comm.start_all_to_all(message, _sizes(leaving, me), _sizes(coming, me))
    return Unshard(homes, blocks, table, comm, pending, before, nodes)


def _sources(table: SlotTable, before: SlotTable, nodes: Nodes | None) -> Sources:
    return sources(table, before, nodes.width if nodes is not None else 0)


def _passes(homes: dict[str, Home], found: Sources, nodes: Nodes, comm: Communicator) -> bool:
    """Whether anything is passed on inside this rank's node; the same answer on all its ranks."""
    return any(found.passes(home.layout, comm.rank // nodes.width) for home in homes.values())


def _to_slots(homes: dict[str, Home], found: Sources, home: int) -> Pieces:
    """What travels between ``home`` and the slots of each rank."""
    ranks = range(len(found.table))
    return [[(name, piece(h.layout, home, found.straight(home, q))) for name, h in homes.items()] for q in ranks]


def _from_homes(homes: dict[str, Home], found: Sources, rank: int) -> Pieces:
    """What travels between each home and the slots of ``rank``."""
    ranks = range(len(found.table))
    return [[(name, piece(h.layout, p, found.straight(p, rank))) for name, h in homes.items()] for p in ranks]


def _piece_at(layout: Layout, home: int, experts: list[int], giver: Sequence[int], taker: Sequence[int]) -> Piece:
    """What a rank passes on of a home's rows, given the experts in its slots and in those of the rank that gets it."""
    return _piece([(giver.index(expert), taker.index(expert)) for expert in experts], layout, home)


@dataclass
class Reshard:
    """Weight gradients on their way home; :meth:`finish` adds them into the parameters' ``.grad``.

    Args:
        homes: The trained parameters by name.
        own: Name to gradients of this rank's block that were made here.
        table: Per rank of ``comm``, the experts in the slots whose gradients travel.
        comm: The ranks over which the homes are sharded.
        replicas: Ranks that hold the same blocks (HSDP).
        pending: What arrives from other ranks, if anything travels.
        scale: Factor of the sum over ranks and replicas.
        nodes: Where there are several.
    """

    homes: dict[str, Home]
    own: dict[str, list[Part]]
    table: SlotTable
    comm: Communicator
    replicas: Communicator
    pending: Pending | None
    scale: float
    nodes: Nodes | None = None

    def finish(self) -> None:
        """Sums in float32, this rank's part first, then in the order of ranks; scales once; accumulates."""
        if self.pending is not None:
            coming = _to_slots(self.homes, _sources(self.table, (), self.nodes), self.comm.rank)
            for name, p, blocks in _unpack(coming, self.comm.rank, self.pending.wait()):
                self.own[name].append(Part(p.experts, blocks))
        for name, home in self.homes.items():
            home.accumulate(self._over_replicas(home, self.own.pop(name)), self.scale)

    def _over_replicas(self, home: Home, parts: list[Part]) -> list[Part]:
        """The sum over the ranks that hold the same block, in float32 (HSDP)."""
        if self.replicas.size == 1:
            return parts
        device = parts[0].blocks.tensor.device if parts else home.local.device
        total = torch.empty(home.layout.block_shape(self.comm.rank), dtype=torch.float32, device=device)
        add_parts(total, parts, 0.0, 1.0)
        return [Part.whole(self.replicas.all_reduce(total))]


def start_reshard(
    homes: dict[str, Home],
    stacks: dict[str, tuple[torch.Tensor, ...]],
    table: SlotTable,
    comm: Communicator,
    replicas: Communicator,
    dtype: torch.dtype,
    scale: float,
    nodes: Nodes | None = None,
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
        nodes: Where there are several; gradients of one expert are summed inside each first, in float32.
    """
    me, pending, beyond = comm.rank, None, beyond_own(homes, table)
    table = table if beyond is None else beyond
    grads = {name: stack[-1] for name, stack in stacks.items()}
    own: dict[str, list[Part]] = {name: [] for name in homes}
    for name, home in homes.items():
        if beyond is not None:
            own[name].append(Part.whole(stacks[name][0]))
        here = piece(home.layout, me, table[me])
        if len(here.experts):
            own[name].append(Part(here.experts, here.of_slots(grads[name])))
    if not is_local(homes, table):
        found = _sources(table, (), nodes)
        leaving, coming = _from_homes(homes, found, me), _to_slots(homes, found, me)
        if nodes is not None and _passes(homes, found, nodes, comm):
            message = _summed(homes, found, grads, leaving, comm, nodes, dtype)
        else:
            message = _pack(leaving, me, grads, Piece.of_slots, dtype)
        pending = comm.start_all_to_all(message, _sizes(leaving, me), _sizes(coming, me))
    return Reshard(homes, own, table, comm, replicas, pending, scale, nodes)


def _summed(
    homes: dict[str, Home],
    found: Sources,
    grads: dict[str, torch.Tensor],
    leaving: Pieces,
    comm: Communicator,
    nodes: Nodes,
    dtype: torch.dtype,
) -> torch.Tensor:
    """This rank's message to the homes: its own gradients and what its node's other ranks give it to pass on."""
    here, me = nodes.ranks(comm.rank, comm.size), comm.rank
    table = found.table

    def between(giver: int, taker: int) -> list[tuple[int, str, Piece]]:
        # Their places in the message to the home, and in the slots of the rank that they come from.
        return [
            (
                home,
                name,
                _piece_at(h.layout, home, experts, _owned(h.layout, home, found.straight(home, giver)), table[taker]),
            )
            for name, h in homes.items()
            for home, experts in (found.passed(h.layout, giver, taker).items() if giver != taker else ())
        ]

    given, got = [between(other, me) for other in here], [between(me, other) for other in here]
    to_givers, from_takers = _unlabelled(given), _unlabelled(got)
    own = me - here.start
    message = _pack(to_givers, own, grads, Piece.of_slots, dtype)
    arrived = nodes.comm.all_to_all(message, _sizes(to_givers, own), _sizes(from_takers, own))
    total = _pack(leaving, me, grads, Piece.of_slots, torch.float32)
    parts = {(home, name): whole for home, name, whole in _wholes(leaving, me, total)}
    labels = (label for of_rank in got for label in of_rank)
    for (home, _, _), (name, p, blocks) in zip(labels, _unpack(from_takers, own, arrived), strict=True):
        add_parts(parts[home, name], [Part(p.experts, blocks)], 1.0, 1.0)
    return total.to(dtype)


def _owned(layout: Layout, home: int, held: Sequence[int]) -> list[int]:
    """The experts of ``held`` that a home has, in the order in which they travel."""
    return [expert for expert in held if expert in layout.experts[home]]


def _unlabelled(pieces: list[list[tuple[int, str, Piece]]]) -> Pieces:
    return [[(name, p) for _, name, p in of_rank] for of_rank in pieces]


def _wholes(pieces: Pieces, me: int, message: torch.Tensor) -> Iterator[tuple[int, str, torch.Tensor]]:
    """What of a message is for each other rank and name, as one tensor."""
    at = 0
    for rank, of_rank in enumerate(pieces):
        for name, p in of_rank if rank != me else ():
            yield rank, name, message[at : at + p.numel].view(p.shape)
            at += p.numel


Pieces = list[list[tuple[str, Piece]]]


def _pack(
    pieces: Pieces,
    me: int,
    tensors: dict[str, torch.Tensor],
    view: Callable[[Piece, torch.Tensor], Blocks],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One message to every other rank, one after the other: ``[elements]``, in ``dtype`` if that is given."""
    like, copies = next(iter(tensors.values())), _Copies()
    message = torch.empty(sum(_sizes(pieces, me)), dtype=dtype or like.dtype, device=like.device)
    for name, p, part in _unpack(pieces, me, message):
        copies.add(part, view(p, tensors[name]))
    copies.make()
    return message


def _unpack(pieces: Pieces, me: int, message: torch.Tensor) -> Iterator[tuple[str, Piece, Blocks]]:
    """The parts of a message from or to every other rank, by name and piece."""
    at = 0
    for rank, of_rank in enumerate(pieces):
        for name, p in of_rank if rank != me else ():
            yield name, p, p.of_message(message[at : at + p.numel])
            at += p.numel


class _Copies:
    """Blocks to be copied, all at once."""

    def __init__(self) -> None:
        self._targets: list[Blocks] = []
        self._sources: list[Blocks] = []

    def add(self, target: Blocks, source: Blocks) -> None:
        self._targets.append(target)
        self._sources.append(source)

    def make(self) -> None:
        copy_all(self._targets, self._sources)


def _sizes(pieces: Pieces, me: int) -> list[int]:
    return [0 if rank == me else sum(p.numel for _, p in of_rank) for rank, of_rank in enumerate(pieces)]
