"""Unshard and reshard: blocks of expert parameters travel to the slots that need them, gradients travel back.

Both directions follow from two tables that all ranks hold: which experts sit in which rank's slots, and which block
of each parameter lives on which rank. From home p to rank q goes, of every parameter, p's rows of those experts in
q's slots that p has; everything for one pair is packed into one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_laer.comm.base import Communicator, Pending
from hf_laer.shard.home import Home, Layout
from hf_laer.shard.slots import SlotPool

SlotTable = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Piece:
    """What travels of one parameter between a home and a rank's slots.

    Args:
        experts: Positions in the home's block.
        slots: Positions in the rank's slots, matching ``experts``.
        rows: The home's rows.
        shape: ``(len(experts), len(rows), …)``.
    """

    experts: list[int]
    slots: list[int]
    rows: range
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return int(torch.Size(self.shape).numel())


def piece(layout: Layout, home: int, held: Sequence[int]) -> Piece:
    """The piece between the home on rank ``home`` and slots that hold the experts ``held``."""
    owned = layout.experts[home]
    pairs = [(expert - owned.start, slot) for slot, expert in enumerate(held) if expert in owned]
    rows = layout.rows[home]
    return Piece([e for e, _ in pairs], [s for _, s in pairs], rows, (len(pairs), len(rows), *layout.shape[2:]))


def is_local(homes: dict[str, Home], table: SlotTable) -> bool:
    """Whether every rank finds all its slots' experts whole in its own home; the same answer on all ranks."""
    return all(
        expert in home.layout.experts[rank] and len(home.layout.rows[rank]) == home.layout.shape[1]
        for home in homes.values()
        for rank, held in enumerate(table)
        for expert in held
    )


def unshard(
    homes: dict[str, Home],
    table: SlotTable,
    comm: Communicator,
    pool: SlotPool,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Fills this rank's slots.

    Args:
        homes: The layer's parameters by name.
        table: Per rank of ``comm``, the experts in its slots.
        comm: The ranks over which the homes are sharded.
        pool: Where the slots are; they hold until the pool's next use.
        dtype: Dtype in which weights travel and are used.
        device: Where the slots are.

    Returns:
        Name to ``[S, D, …]``.
    """
    me = comm.rank
    blocks = {name: home.local.to(device, dtype, non_blocking=True) for name, home in homes.items()}
    if is_local(homes, table) and all(list(table[me]) == list(h.layout.experts[me]) for h in homes.values()):
        return blocks
    slots = {
        name: pool.take(name, (len(table[me]), *home.layout.shape[1:]), dtype, device) for name, home in homes.items()
    }
    for name, home in homes.items():
        _place(slots[name], piece(home.layout, me, table[me]), blocks[name], pick=True)
    if not is_local(homes, table):
        _fetch(homes, blocks, slots, table, comm)
    return slots


def _fetch(
    homes: dict[str, Home],
    blocks: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
    table: SlotTable,
    comm: Communicator,
) -> None:
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    leaving = {q: [(name, piece(home.layout, me, table[q])) for name, home in homes.items()] for q in others}
    coming = {p: [(name, piece(home.layout, p, table[me])) for name, home in homes.items()] for p in others}
    parts = [blocks[name][p.experts].reshape(-1) for q in others for name, p in leaving[q]]
    packed = torch.cat(parts)
    arrived = comm.all_to_all(packed, _sizes(leaving, comm.size), _sizes(coming, comm.size))
    at = 0
    for rank in others:
        for name, p in coming[rank]:
            _place(slots[name], p, arrived[at : at + p.numel].view(p.shape), pick=False)
            at += p.numel


def _place(slots: torch.Tensor, p: Piece, block: torch.Tensor, pick: bool) -> None:
    """Writes a home's rows of the experts into their slots."""
    if p.numel:
        slots[p.slots, p.rows.start : p.rows.stop] = block[p.experts] if pick else block


@dataclass
class Reshard:
    """Weight gradients on their way home; :meth:`finish` adds them into the parameters' ``.grad``."""

    homes: dict[str, Home]
    table: SlotTable
    comm: Communicator
    replicas: Communicator
    divisor: int
    blocks: dict[str, torch.Tensor]
    pending: Pending | None

    def finish(self) -> None:
        """Sums what arrives in float32, in the order of ranks, averages once, and accumulates."""
        if self.pending is not None:
            arrived, at = self.pending.wait(), 0
            for rank in range(self.comm.size):
                if rank == self.comm.rank:
                    continue
                for name, home in self.homes.items():
                    p = piece(home.layout, self.comm.rank, self.table[rank])
                    self._add(name, p.experts, arrived[at : at + p.numel].view(p.shape))
                    at += p.numel
        for name, home in self.homes.items():
            block = self.replicas.all_reduce(self.blocks.pop(name))
            home.accumulate(block.div_(self.divisor))

    def _add(self, name: str, experts: list[int], part: torch.Tensor) -> None:
        if part.numel():
            # An expert sits on a rank at most once, so no index repeats and the sum is deterministic.
            self.blocks[name][experts] += part


def start_reshard(
    homes: dict[str, Home],
    grads: dict[str, torch.Tensor],
    table: SlotTable,
    comm: Communicator,
    replicas: Communicator,
    dtype: torch.dtype,
) -> Reshard:
    """Sends the gradients of this rank's slots home.

    Args:
        homes: The trained parameters by name.
        grads: Name to ``[S, D, …]``, the gradients of this rank's slots.
        table: Per rank of ``comm``, the experts in its slots.
        comm: The ranks over which the homes are sharded.
        replicas: Ranks that hold the same blocks (HSDP).
        dtype: Dtype in which gradients travel.
    """
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    pending = None
    if not is_local(homes, table):
        leaving = {p: [(name, piece(h.layout, p, table[me])) for name, h in homes.items()] for p in others}
        coming = {q: [(name, piece(h.layout, me, table[q])) for name, h in homes.items()] for q in others}
        parts = [
            grads[name][p.slots, p.rows.start : p.rows.stop].to(dtype).reshape(-1)
            for rank in others
            for name, p in leaving[rank]
        ]
        pending = comm.start_all_to_all(torch.cat(parts), _sizes(leaving, comm.size), _sizes(coming, comm.size))
    blocks = {}
    for name, home in homes.items():
        p = piece(home.layout, me, table[me])
        blocks[name] = grads[name].new_zeros(home.layout.block_shape(me), dtype=torch.float32)
        if p.numel:
            blocks[name][p.experts] = grads[name][p.slots, p.rows.start : p.rows.stop].float()
    return Reshard(homes, table, comm, replicas, comm.size * replicas.size, blocks, pending)


def _sizes(pieces: dict[int, list[tuple[str, Piece]]], ranks: int) -> list[int]:
    return [sum(p.numel for _, p in pieces.get(rank, ())) for rank in range(ranks)]
