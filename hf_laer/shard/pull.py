"""Unshard without messages: each rank lays out in memory what the others need of its blocks, and they copy it.

For few large experts, each of which is cut over all ranks: a copy engine brings such a piece into its slot while the
device computes, with nothing to pack or unpack. Many small pieces cost the host more than the messages do.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_laer.comm.arena import LAYING, PULLING, Arena
from hf_laer.comm.base import Communicator
from hf_laer.compute.segments import Blocks, copy_all
from hf_laer.shard.home import Home
from hf_laer.shard.nodes import SlotTable

# Copies that one unshard may ask of the host; each takes some ten microseconds.
MOST_COPIES = 128
_ALIGNMENT = 256


@dataclass
class Pull:
    """Experts on their way into slots that nobody uses; what :class:`~hf_laer.shard.exchange.Unshard` is for messages.

    Args:
        table: Per rank of ``comm``, the experts that are fetched into its slots.
        comm: The ranks over which the homes are sharded.
        arena: Where they are read.
        done: When the last one has arrived.
    """

    table: SlotTable
    comm: Communicator
    arena: Arena
    done: Any

    def fill(self, slots: dict[str, torch.Tensor]) -> None:
        """The device waits; the slots are those that were given."""
        self.wait()

    def wait(self) -> None:
        """The device waits."""
        self.arena.wait(self.done)


def staged_bytes(homes: dict[str, Home], slots: int, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of a rank's blocks as they are laid out; 0 where experts are not to be fetched so. The same on all ranks.

    Args:
        homes: The layer's parameters by name.
        slots: Experts of the rank that fetches most.
        ranks: N.
        dtype: Of the slots.
    """
    layouts = [home.layout for home in homes.values()]
    # Not the first rank, which also owns a single expert whole.
    cut = all(len(layout.experts[-1]) == layout.shape[0] for layout in layouts)
    few = slots * len(layouts) * (ranks - 1) <= MOST_COPIES
    return _places(homes, dtype)[1] if cut and few else 0


def start_pull(
    homes: dict[str, Home],
    table: SlotTable,
    comm: Communicator,
    arena: Arena,
    slots: dict[str, torch.Tensor],
    after: Any,
) -> Pull:
    """Copies experts into their slots. Collective over ``comm``.

    Args:
        homes: The layer's parameters by name.
        table: Per rank of ``comm``, the experts to fetch.
        comm: The ranks over which the homes are sharded.
        arena: Theirs.
        slots: Name to ``[S, D, …]``, the last ones for these experts.
        after: The arena's mark after which nobody uses the slots, and the parameters are those that are wanted.
    """
    me, held = comm.rank, table[comm.rank]
    dtype = next(iter(slots.values())).dtype
    mine = {name: stack[len(stack) - len(held) :] for name, stack in slots.items()}
    local = {name: home.local for name, home in homes.items()}
    blocks = [_blocks(homes, arena, dtype, rank) for rank in range(comm.size)]
    wanted = {expert for rank, row in enumerate(table) if rank != me for expert in row}
    with arena.aside(after, PULLING):
        arena.meet()  # all have what they wanted of what lay there
        free = arena.mark()
    for portion in _portions(homes):
        with arena.aside(free, LAYING):
            for name, experts in portion:
                for some in _runs(wanted, experts):
                    blocks[me][name][some].copy_(local[name][some], non_blocking=True)
            there = arena.mark()
        with arena.aside(there, PULLING):
            arena.meet()
            # Each begins with another rank, so that no link has to carry all at once.
            for rank in ((me + at) % comm.size for at in range(1, comm.size)):
                for name, experts in portion:
                    _copy_of(blocks[rank][name], mine[name], homes[name].layout.rows[rank], held, experts)
    with arena.aside(free, LAYING):
        _copy_own(homes, local, mine, held, me)
        own = arena.mark()
    with arena.aside(own, PULLING):
        return Pull(table, comm, arena, arena.mark())


def _runs(wanted: Collection[int], experts: range) -> list[slice]:
    """Those of some experts that are wanted, as runs of neighbours."""
    some = [expert for expert in experts if expert in wanted]
    starts = [expert for expert in some if expert - 1 not in some]
    stops = [expert + 1 for expert in some if expert + 1 not in some]
    return [slice(*run) for run in zip(starts, stops, strict=True)]


def _copy_of(block: torch.Tensor, slots: torch.Tensor, rows: range, held: tuple[int, ...], experts: range) -> None:
    """A rank's rows of the experts that are held here, of some experts."""
    for slot, expert in enumerate(held):
        if expert in experts:
            slots[slot, rows.start : rows.stop].copy_(block[expert], non_blocking=True)


def _copy_own(
    homes: dict[str, Home],
    blocks: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
    held: tuple[int, ...],
    rank: int,
) -> None:
    """This rank's own rows."""
    every, held_here = np.arange(len(held)), np.array(held, np.int64)
    targets = [Blocks(slots[name], every, home.layout.rows[rank]) for name, home in homes.items()]
    copy_all(targets, [Blocks(blocks[name], held_here, range(blocks[name].shape[1])) for name in homes])


def _portions(homes: dict[str, Home]) -> list[list[tuple[str, range]]]:
    """Names and experts in the order in which they are laid out and fetched, the small first.

    While one portion is fetched the next is laid out, so they are some, but not many.
    """
    size = {name: math.prod(home.layout.shape) for name, home in homes.items()}
    names = sorted(homes, key=size.__getitem__)
    large = [name for name in names if size[name] * len(names) >= size[names[-1]]]
    portions = [[(name, range(homes[name].layout.shape[0])) for name in names if name not in large]]
    for name in large:
        count = homes[name].layout.shape[0]
        portions += [[(name, range(count // 2))], [(name, range(count // 2, count))]]
    # What is small goes with the first of what is large.
    return [portions[0] + portions[1], *portions[2:]]


def _blocks(homes: dict[str, Home], arena: Arena, dtype: torch.dtype, rank: int) -> dict[str, torch.Tensor]:
    """A rank's blocks where they are laid out."""
    memory, (places, _), found = arena.of(rank), _places(homes, dtype), {}
    for name, home in homes.items():
        shape = home.layout.block_shape(rank)
        found[name] = memory[places[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return found


def _places(homes: dict[str, Home], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Where each parameter's block begins, on every rank, and where the last one ends; the first rank's is largest."""
    places, end = {}, 0
    for name, home in homes.items():
        places[name] = end
        end += -(-math.prod(home.layout.block_shape(0)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end
