"""Nodes: what several ranks of one node need of another node crosses the border once and is passed on inside.

Who passes what on follows from the slot tables, which all ranks hold. Rows of an expert that live on another node come
from a rank of the own node that has the expert in its slots already, if there is one; else one of those that need it
gets them from their home and passes them on. Which one differs from home to home, so that all of them take a part.
Gradients go the same ways back, and are summed inside the node first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hf_laer.comm.base import Communicator
from hf_laer.shard.home import Layout

SlotTable = tuple[tuple[int, ...], ...]
# In place of an expert that comes another way.
ELSEWHERE = -1
# As many as tables are kept of in `hf_laer.shard.exchange`.
TABLES = 256


@dataclass(frozen=True)
class Nodes:
    """The nodes of the ranks that shard the experts; there are several, and ranks with others on their node.

    Args:
        width: Consecutive ranks that share a node; the last node may have fewer.
        comm: This rank's node.
    """

    width: int
    comm: Communicator

    def ranks(self, rank: int, size: int) -> range:
        """The ranks on the node of ``rank``, of ``size`` in all."""
        start = rank // self.width * self.width
        return range(start, min(start + self.width, size))


class Sources:
    """From where each slot gets each home's rows.

    Args:
        table: Per rank, the experts that come into its slots.
        before: Per rank, the experts that are in its slots already; empty where none are.
        width: Ranks per node; 0 where all rows come straight from their homes.
    """

    def __init__(self, table: SlotTable, before: SlotTable, width: int) -> None:
        self.table, self._width = table, width
        self._there = _holders(before, width) if width else {}
        self._here = _holders(table, width) if width else {}

    def straight(self, home: int, rank: int) -> tuple[int, ...]:
        """The row of ``rank``, with ``ELSEWHERE`` for what does not come straight from ``home``."""
        row = self.table[rank]
        if not self._width or home // self._width == rank // self._width:
            return row
        node = rank // self._width
        return tuple([expert if self._giver(node, home, expert) == rank else ELSEWHERE for expert in row])

    def passed(self, layout: Layout, giver: int, taker: int) -> dict[int, list[int]]:
        """What ``giver`` passes on to ``taker`` of the same node: by home, on other nodes, the experts."""
        node, found = taker // self._width, dict[int, list[int]]()
        for expert in self.table[taker]:
            holders = self._holders(node, expert)
            if giver not in holders:
                continue
            # Those homes whose turn is the giver's.
            first = (holders.index(giver) - expert) % len(holders)
            for home in range(first, len(self.table), len(holders)):
                if home // self._width != node and _owns(layout, home, expert):
                    found.setdefault(home, []).append(expert)
        return found

    def _holders(self, node: int, expert: int) -> tuple[int, ...]:
        """The ranks of a node that take turns in getting an expert across, or have it."""
        return self._there.get((node, expert)) or self._here[node, expert]

    def _giver(self, node: int, home: int, expert: int) -> int:
        """The rank that gets what lives on ``home`` of another node, or has it."""
        holders = self._holders(node, expert)
        return holders[(home + expert) % len(holders)]

    def passes(self, layout: Layout, node: int) -> bool:
        """Whether anything is passed on inside a node; the same answer on all its ranks."""
        inside = range(node * self._width, (node + 1) * self._width)
        return bool(self._width) and any(
            (where, expert) in self._there or len(holders) > 1
            for (where, expert), holders in self._here.items()
            if where == node
            and any(_owns(layout, home, expert) for home in range(len(self.table)) if home not in inside)
        )


@lru_cache(maxsize=TABLES)
def sources(table: SlotTable, before: SlotTable, width: int) -> Sources:
    """The sources of a table's slots."""
    return Sources(table, before, width)


def _owns(layout: Layout, home: int, expert: int) -> bool:
    return expert in layout.experts[home] and len(layout.rows[home]) > 0


def _holders(table: SlotTable, width: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """The ranks that hold an expert, by node and expert."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank, row in enumerate(table):
        for expert in row:
            key = rank // width, expert
            found[key] = (*found.get(key, ()), rank)
    return found
