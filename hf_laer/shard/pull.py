"""Unshard without messages: each rank lays its blocks out in memory that the others read, and they copy what they need.

For few large experts, each of which is cut over all ranks: a copy engine brings such a piece into its slot while the
device computes, with nothing to pack or unpack. Many small pieces cost the host more than the messages do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_laer.comm.arena import Arena
from hf_laer.comm.base import Communicator
from hf_laer.shard.exchange import piece
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


def pullable(homes: dict[str, Home], table: SlotTable) -> bool:
    """Whether experts are cut over the ranks, in pieces few enough; the same answer on all ranks."""
    layouts = [home.layout for home in homes.values()]
    cut = all(len(layout.experts[0]) == layout.shape[0] for layout in layouts)
    return cut and max(map(len, table)) * len(layouts) * (len(table) - 1) <= MOST_COPIES


def staged_bytes(homes: dict[str, Home], dtype: torch.dtype) -> int:
    """Bytes of a rank's blocks as they are laid out."""
    return _places(homes, dtype)[1]


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
    me = comm.rank
    kind = next(iter(slots.values())).dtype
    mine = {name: stack[len(stack) - len(table[me]) :] for name, stack in slots.items()}
    with arena.aside(after):
        arena.meet()  # all have what they wanted of what lay there
        for name, block in _blocks(homes, arena, kind, me):
            block.copy_(homes[name].local, non_blocking=True)
        arena.meet()
        # Each begins with another rank, so that no link has to carry all at once.
        for rank in ((me + at) % comm.size for at in range(1, comm.size + 1)):
            for name, block in _blocks(homes, arena, kind, rank):
                here = piece(homes[name].layout, rank, table[me])
                for target, source in zip(here.of_slots(mine[name]), here.of_home(block), strict=True):
                    for into, out_of in zip(target.unbind(), source.unbind(), strict=True):
                        into.copy_(out_of, non_blocking=True)
        done = arena.mark()
    return Pull(table, comm, arena, done)


def _blocks(homes: dict[str, Home], arena: Arena, dtype: torch.dtype, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's blocks where they are laid out."""
    memory, (places, _) = arena.of(rank), _places(homes, dtype)
    for name, home in homes.items():
        shape = home.layout.block_shape(rank)
        yield name, memory[places[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _places(homes: dict[str, Home], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Where each parameter's block begins, on every rank, and where the last one ends; the first rank's is largest."""
    places, end = {}, 0
    for name, home in homes.items():
        places[name] = end
        end += -(-math.prod(home.layout.block_shape(0)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end
