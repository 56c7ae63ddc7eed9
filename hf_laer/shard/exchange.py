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
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.comm.base import Communicator, Pending
from hf_laer.compute.segments import Blocks, Part, add_parts, copy_all
from hf_laer.shard.home import Home, Layout
from hf_laer.shard.nodes import Nodes, SlotTable, Sources, sources

# Over 1,000 ranks one takes 100 KB: room for the tables of a pass, and not for a thousand.
TABLES = 256
# What travels by a table is kept for its backward; over 1,000 ranks that takes 400 KB.
WAYS = 128


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


# Per rank, what travels between it and this one: the home whose rows these are, the parameter and the piece.
Pieces = list[list[tuple[int, str, Piece]]]


class Mail(NamedTuple):
    """One message to, or from, every other rank, one after the other.

    Args:
        parts: In order, all pieces that are not empty.
        numels: Elements of each.
        sizes: Elements for each rank.
    """

    parts: list[tuple[int, str, Piece]]
    numels: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, pieces: Pieces, me: int) -> Mail:
        """Of what travels between rank ``me`` and each."""
        parts = [[] if rank == me else [one for one in some if one[2].numel] for rank, some in enumerate(pieces)]
        numels = [[one[2].numel for one in some] for some in parts]
        joined = [one for some in parts for one in some], [numel for some in numels for numel in some]
        return cls(*joined, [sum(some) for some in numels])

    def pack(
        self,
        tensors: dict[str, torch.Tensor],
        view: Callable[[Piece, torch.Tensor], Blocks],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The message ``[elements]``, in ``dtype`` if that is given."""
        like, copies = next(iter(tensors.values())), Copies()
        message = torch.empty(sum(self.sizes), dtype=dtype or like.dtype, device=like.device)
        for _, name, p, part in self.unpack(message):
            copies.add(part, view(p, tensors[name]))
        copies.make()
        return message

    def unpack(self, message: torch.Tensor) -> Iterator[tuple[int, str, Piece, Blocks]]:
        """The parts of the message."""
        cut = message.split_with_sizes(self.numels) if self.parts else ()
        for (home, name, p), part in zip(self.parts, cut, strict=True):
            yield home, name, p, Blocks.whole(part.view(p.shape))


class Copies:
    """Blocks to be copied, all at once."""

    def __init__(self) -> None:
        self._targets: list[Blocks] = []
        self._sources: list[Blocks] = []

    def add(self, target: Blocks, source: Blocks) -> None:
        """One pair."""
        if len(target.which):
            self._targets.append(target)
            self._sources.append(source)

    def make(self) -> None:
        """All of them."""
        copy_all(self._targets, self._sources)


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
    if not layout.is_whole or any(held[: len(mine)] != mine for held, mine in zip(table, own, strict=True)):
        return None
    return tuple(held[len(mine) :] for held, mine in zip(table, own, strict=True))


def stacks_of(homes: dict[str, Home], table: SlotTable, rank: int) -> tuple[int, ...]:
    """Slots in each stack of a rank's weights: its own experts where they live, and what it fetches, if anything."""
    beyond, held = beyond_own(homes, table), len(table[rank])
    if beyond is None:
        return (held,)
    fetched = len(beyond[rank])
    return (held - fetched, fetched) if fetched else (held,)


def forget_tables() -> None:
    """Drops what is kept of slot tables seen; it is bounded, but may grow for thousands of steps until it is full."""
    for kept in (piece, _is_local, _beyond_own, sources, _ways):
        kept.cache_clear()


@dataclass
class Unshard:
    """Experts on their way to this rank's slots.

    Args:
        homes: The layer's parameters by name.
        blocks: Name to this rank's block on the device of the slots, in the home's dtype or theirs.
        table: Per rank of ``comm``, the experts that are fetched into its slots.
        comm: The ranks over which the homes are sharded.
        pending: What arrives from other ranks, if anything travels.
        before: Per rank, the experts in its slots before these, if there are any.
        nodes: Where there are several.
        ways: What travels.
    """

    homes: dict[str, Home]
    blocks: dict[str, torch.Tensor]
    table: SlotTable
    comm: Communicator
    pending: Pending | None
    before: SlotTable
    nodes: Nodes | None
    ways: Ways

    def fill(self, slots: dict[str, torch.Tensor]) -> None:
        """Waits, and writes the experts behind those that are there: into name to ``[S, D, …]``, all of its slots."""
        me, copies = self.comm.rank, Copies()
        start = len(self.before[me]) if self.before else 0
        mine = {name: stack[start : start + len(self.table[me])] for name, stack in slots.items()}
        for name, own in self.ways.own:
            copies.add(own.of_slots(mine[name]), own.of_home(self.blocks[name]))
        if self.pending is not None:
            for _, name, p, part in self.ways.from_homes.unpack(self.pending.wait()):
                copies.add(p.of_slots(mine[name]), part)
        copies.make()
        if self.pending is not None:
            self._pass_on(self.ways.found, slots)

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

        def between(giver: int, taker: int) -> list[tuple[int, str, Piece]]:
            return [
                (at, name, _piece_at(home.layout, at, experts, rows[giver], rows[taker]))
                for name, home in self.homes.items()
                for at, experts in (found.passed(home.layout, giver, taker).items() if giver != taker else ())
            ]

        own = me - here.start
        leaving = Mail.of([between(me, other) for other in here], own)
        coming = Mail.of([between(other, me) for other in here], own)
        arrived = nodes.comm.all_to_all(leaving.pack(slots, Piece.of_giver), leaving.sizes, coming.sizes)
        copies = Copies()
        for _, name, p, part in coming.unpack(arrived):
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
        whole: This rank's block is used too: if it comes from the host, it does so in ``dtype``.
    """
    ways, pending = ways_of(homes, table, before, nodes, comm.rank), None
    # One that is here already is converted when it is needed.
    kinds = {name: dtype if whole and home.local.device != device else None for name, home in homes.items()}
    blocks = {name: home.local.to(device, kinds[name], non_blocking=True) for name, home in homes.items()}
    if not ways.is_local:
        message = ways.to_slots.pack(blocks, Piece.of_home, dtype)
        pending = comm.start_all_to_all(message, ways.to_slots.sizes, ways.from_homes.sizes)
    return Unshard(homes, blocks, table, comm, pending, before, nodes, ways)


class Ways(NamedTuple):
    """How the experts of a slot table get there, as one rank sees it.

    Args:
        found: From where each slot gets each home's rows.
        is_local: Nothing travels.
        own: By name, what this rank's slots hold of its own home.
        to_slots: Between this rank's home and the slots of the others.
        from_homes: Between the homes of the others and this rank's slots.
    """

    found: Sources
    is_local: bool
    own: list[tuple[str, Piece]]
    to_slots: Mail
    from_homes: Mail


def ways_of(homes: dict[str, Home], table: SlotTable, before: SlotTable, nodes: Nodes | None, me: int) -> Ways:
    """The ways of rank ``me``; see :func:`start_unshard`."""
    layouts = tuple([(name, home.layout) for name, home in homes.items()])
    return _ways(layouts, table, before, nodes.width if nodes is not None else 0, me)


@lru_cache(maxsize=WAYS)
def _ways(layouts: tuple[tuple[str, Layout], ...], table: SlotTable, before: SlotTable, width: int, me: int) -> Ways:
    found, ranks = sources(table, before, width), range(len(table))

    def between(home: int, rank: int) -> list[tuple[int, str, Piece]]:
        return [(home, name, piece(layout, home, found.straight(home, rank))) for name, layout in layouts]

    is_local = all(_is_local(layout, table) for _, layout in layouts)
    own = [(name, piece(layout, me, table[me])) for name, layout in layouts]
    to_slots, from_homes = [between(me, rank) for rank in ranks], [between(home, me) for home in ranks]
    return Ways(found, is_local, own, Mail.of(to_slots, me), Mail.of(from_homes, me))


def _passes(homes: dict[str, Home], found: Sources, nodes: Nodes, comm: Communicator) -> bool:
    """Whether anything is passed on inside this rank's node; the same answer on all its ranks."""
    return any(found.passes(home.layout, comm.rank // nodes.width) for home in homes.values())


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
        coming: What arrives.
    """

    homes: dict[str, Home]
    own: dict[str, list[Part]]
    table: SlotTable
    comm: Communicator
    replicas: Communicator
    pending: Pending | None
    scale: float
    coming: Mail

    def finish(self) -> None:
        """Sums in float32, this rank's part first, then in the order of ranks; scales once; accumulates."""
        if self.pending is not None:
            for _, name, p, blocks in self.coming.unpack(self.pending.wait()):
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
    pending, beyond = None, beyond_own(homes, table)
    table = table if beyond is None else beyond
    ways = ways_of(homes, table, (), nodes, comm.rank)
    # Of what was fetched; where nothing was, nothing is taken of these.
    grads = {name: stack[-1] for name, stack in stacks.items()}
    own: dict[str, list[Part]] = {name: [] for name in homes}
    for name, here in ways.own:
        if beyond is not None:
            own[name].append(Part.whole(stacks[name][0]))
        if len(here.experts):
            own[name].append(Part(here.experts, here.of_slots(grads[name])))
    if not ways.is_local:
        leaving = ways.from_homes
        if nodes is not None and _passes(homes, ways.found, nodes, comm):
            message = _summed(homes, ways.found, grads, leaving, comm, nodes, dtype)
        else:
            message = leaving.pack(grads, Piece.of_slots, dtype)
        pending = comm.start_all_to_all(message, leaving.sizes, ways.to_slots.sizes)
    return Reshard(homes, own, table, comm, replicas, pending, scale, ways.to_slots)


def _summed(
    homes: dict[str, Home],
    found: Sources,
    grads: dict[str, torch.Tensor],
    leaving: Mail,
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

    own = me - here.start
    given = Mail.of([between(other, me) for other in here], own)
    got = Mail.of([between(me, other) for other in here], own)
    arrived = nodes.comm.all_to_all(given.pack(grads, Piece.of_slots, dtype), given.sizes, got.sizes)
    total = leaving.pack(grads, Piece.of_slots, torch.float32)
    parts = {(home, name): blocks.tensor for home, name, _, blocks in leaving.unpack(total)}
    for home, name, p, blocks in got.unpack(arrived):
        add_parts(parts[home, name], [Part(p.experts, blocks)], 1.0, 1.0)
    return total.to(dtype)


def _owned(layout: Layout, home: int, held: Sequence[int]) -> list[int]:
    """The experts of ``held`` that a home has, in the order in which they travel."""
    return [expert for expert in held if expert in layout.experts[home]]
