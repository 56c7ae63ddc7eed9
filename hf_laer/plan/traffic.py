"""Rows that a plan sends: one row per (token, destination rank), counted per link from counts alone.

A token's k experts are known only as counts, so the number of distinct destinations is the expected one if
the k
choices were drawn independently: of T tokens with a share p of the choices, ``T * (1 - (1 - p) ** k)`` send a
row. Exact for k = 1 and where all stays home.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._jit import kernel
from .types import Split


@dataclass(frozen=True, eq=False)
class Traffic:
    """Expected rows of one dispatch; combine sends the same rows back. float64 arrays.

    Args:
        sent_near: ``[N]`` rows to other ranks of the own node.
        received_near: ``[N]`` rows from other ranks of the own node.
        sent_far: ``[N]`` rows to other nodes.
        received_far: ``[N]`` rows from other nodes.
        stayed: ``[N]`` rows that never left their rank.
        foreign_nodes: Assignments (token, expert) that leave their node, exact.
    """

    sent_near: np.ndarray
    received_near: np.ndarray
    sent_far: np.ndarray
    received_far: np.ndarray
    stayed: np.ndarray
    foreign_nodes: int

    @property
    def received(self) -> np.ndarray:
        """float64 ``[N]``: rows that each rank computes on."""
        return self.received_near + self.received_far + self.stayed


def traffic(loads: np.ndarray, split: Split, width: int, top_k: int) -> Traffic:
    """The rows that ``split`` sends for ``loads`` int64 ``[N, E]`` on nodes of ``width`` ranks."""
    rows, foreign = rows_of(loads, split.first, split.rank, split.end, width, top_k)
    return Traffic(rows[0], rows[1], rows[2], rows[3], rows[4], int(foreign))


@kernel
def rows_of(
    loads: np.ndarray, first: np.ndarray, rank: np.ndarray, end: np.ndarray, width: int, top_k: int
) -> tuple[np.ndarray, int]:
    """Rows ``[5, N]`` in the order of :class:`Traffic`, and the assignments that leave their node."""
    ranks, experts = loads.shape
    rows = np.zeros((5, ranks), np.float64)
    at = first[:-1].copy()
    begin = np.zeros(experts, np.int64)
    choices = np.zeros(ranks, np.int64)
    touched = np.empty(ranks, np.int64)
    foreign = 0
    for source in range(ranks):
        count, total = 0, 0
        for expert in range(experts):
            tokens = loads[source, expert]
            total += tokens
            while tokens > 0:
                while end[at[expert]] <= begin[expert]:
                    at[expert] += 1
                target = rank[at[expert]]
                take = min(tokens, end[at[expert]] - begin[expert])
                if choices[target] == 0:
                    touched[count] = target
                    count += 1
                choices[target] += take
                begin[expert] += take
                tokens -= take
        for target in touched[:count]:
            sent = _distinct(choices[target], total, top_k)
            if target == source:
                rows[4, source] += sent
            elif target // width == source // width:
                rows[0, source] += sent
                rows[1, target] += sent
            else:
                rows[2, source] += sent
                rows[3, target] += sent
                foreign += choices[target]
            choices[target] = 0
    return rows, foreign


@kernel
def _distinct(choices: int, total: int, top_k: int) -> float:
    miss = 1.0 - choices / total
    none = 1.0
    for _ in range(top_k):
        none *= miss
    return total / top_k * (1.0 - none)
