"""The tuner: makes the next placement of each layer from its recent loads, off the training thread.

A placement depends only on loads that all ranks hold, so each rank works it out for itself; but one rank may be done
before another. So each says, with its next loads, which version is the newest it has ready, and all use the least of
these: a late one means that *every* rank keeps the old layout. No collective is added, none leaves the training thread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_laer.config import LaerConfig
from hf_laer.plan import (
    CostModel,
    begins_with_owned,
    chunk_owners,
    fsep_placement,
    initial_placement,
    replica_placement,
)
from hf_laer.plan.forecast import FORECASTS, SETTLED, Forecaster, miss
from hf_laer.plan.replicas import RECENT
from hf_laer.plan.types import Placement, Plan, is_level

# Versions under way beyond the one in use; the oldest of them is the next one used.
AHEAD = 2


class Version(NamedTuple):
    """A layout: one placement for each token group.

    Args:
        number: Training micro-batches that it knows of.
        placements: Group by group.
        digest: A hash that fits an int64.
    """

    number: int
    placements: list[Placement]
    digest: int


class LayerTuner:
    """Placements of one layer, one for each token group.

    Args:
        config: Slots, history, forecast and interval.
        num_experts: E.
        groups: Ranks of each token group; consecutive, alike on all ranks.
        ranks_per_node: Ranks that share a node.
        pool: One thread; placements are worked out there, and the planner lets go of the interpreter meanwhile.
        cost: Layer and machine, by which replicas of experts that live whole with an owner are weighed.
    """

    def __init__(
        self,
        config: LaerConfig,
        num_experts: int,
        groups: list[range],
        ranks_per_node: int,
        pool: ThreadPoolExecutor,
        cost: CostModel | None = None,
    ) -> None:
        self._config, self._groups, self._pool = config, groups, pool
        self._ranks_per_node, self._cost = ranks_per_node, cost
        self._homes = config.homes or "sharded"
        self._slots = [config.slots_for(num_experts, len(group)) for group in groups]
        self._forecaster = Forecaster(config.history, config.forecast)
        self._seen = 0
        self._choice = self._homes == "whole" or any(room < num_experts for room in self._slots)
        self._placed_for = np.ones((len(groups), num_experts), np.int64)
        self._current = version_of(0, [self._start(*one) for one in zip(groups, self._slots, strict=True)])
        self._ready: deque[Version] = deque()
        self._under_way: deque[Future[Version]] = deque()

    def _start(self, group: range, slots: int) -> Placement:
        """Before any load is known: copies as equal as can be, or own experts alone."""
        experts, ranks = self._placed_for.shape[1], len(group)
        if self._homes == "whole":
            return replica_placement(np.zeros(experts, np.int64), chunk_owners(experts, ranks), ranks, slots)
        return initial_placement(experts, ranks, slots)

    @property
    def forecast(self) -> str:
        """The forecast in use: the config's, or the one that has missed by least so far."""
        return self._forecaster.name

    @property
    def layout(self) -> list[Placement]:
        """The layout in use, one placement for each token group."""
        return self._current.placements

    def newest(self) -> tuple[int, int]:
        """Number and digest of the newest version that is ready here.

        Where torch is told to be deterministic, the ones under way are waited for, so that a run can be repeated.
        """
        newest = self._newest(wait=torch.are_deterministic_algorithms_enabled())
        return newest.number, newest.digest

    def _newest(self, wait: bool) -> Version:
        while self._under_way and (wait or self._under_way[0].done()):
            self._ready.append(self._under_way.popleft().result())
        return self._ready[-1] if self._ready else self._current

    def agree(self, numbers: np.ndarray, digests: np.ndarray) -> None:
        """Takes up the newest layout that all ranks have, from what each said of its own newest.

        Args:
            numbers: int64 ``[N]``, of every rank's :meth:`newest`.
            digests: int64 ``[N]``, likewise.

        Raises:
            RuntimeError: Two ranks made different layouts of one version.
        """
        least = int(numbers.min())
        while self._ready and self._ready[0].number <= least:
            self._current = self._ready.popleft()
        differing = np.flatnonzero((numbers == self._current.number) & (digests != self._current.digest))
        if self._current.number != least or len(differing):
            raise RuntimeError(
                f"ranks {differing.tolist()} made another layout {least} than this rank, which would send tokens "
                "astray: report this, with the CPU types of the nodes"
            )

    def observe(self, loads: np.ndarray, plans: Sequence[Plan]) -> None:
        """Feeds one training micro-batch; starts on the next layout if one is due.

        Args:
            loads: int64 ``[N, E]``, of all groups' ranks.
            plans: What was made of them, group by group.
        """
        totals = np.stack([loads[group.start : group.stop].sum(0) for group in self._groups])
        self._forecaster.observe(totals)
        self._seen += 1
        due = self._seen % self._config.relayout_interval == 0
        if due and len(self._ready) + len(self._under_way) < AHEAD:
            expected = self._forecaster.expected()
            if not is_level(plans) or (self._choice and self._moved(expected)):
                self._placed_for = expected
                self._under_way.append(self._pool.submit(self._work_out, self._seen, *self._basis(expected)))

    def _basis(self, expected: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], int]:
        """What a layout is made of: expected loads, recent ones, and how far to trust the former."""
        recent = list(self._forecaster.history)[::-1][:RECENT]
        return expected, recent if self._homes == "whole" else [], self._forecaster.hedge

    def _moved(self, expected: np.ndarray) -> bool:
        """Whether other loads are expected than those that the newest layout was made for.

        The layout in use may still be level; once it is not, the next one comes a step late.
        """
        pairs = zip(self._placed_for, expected, strict=True)
        return any(miss(before[None], now[None]) > SETTLED for before, now in pairs)

    def state_dict(self) -> dict[str, Any]:
        """Recent loads and the newest layout, waited for, in JSON's types; the same on all ranks."""
        newest = self._newest(wait=True)
        return {
            "seen": self._seen,
            "homes": self._homes,
            "history": [loads.tolist() for loads in self._forecaster.history],
            "misses": self._forecaster.misses,
            "placements": [placement.slots.tolist() for placement in newest.placements],
            "placed_for": self._placed_for.tolist(),
        }

    def load_state_dict(self, memory: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; a layout for another number of ranks or slots, or for experts that lived
        otherwise, is made anew.
        """
        self._ready.clear()
        self._under_way.clear()
        self._seen = memory["seen"]
        self._forecaster = Forecaster(self._config.history, self._config.forecast)
        self._forecaster.misses = {name: int(memory["misses"][name]) for name in FORECASTS}
        tables = [np.array(table, np.int64) for table in memory["placements"]]
        totals = [np.array(loads, np.int64) for loads in memory["history"]]
        if all(len(loads) == len(self._groups) for loads in totals):
            self._forecaster.history.extend(totals)
            self._placed_for = np.array(memory.get("placed_for", self._placed_for), np.int64)
        if self._suit(tables, memory.get("homes", "sharded")):
            self._current = version_of(self._seen, [Placement(table) for table in tables])
        elif self._forecaster.history:
            self._placed_for = self._forecaster.expected()
            self._current = self._work_out(self._seen, *self._basis(self._placed_for))

    def _suit(self, tables: list[np.ndarray], homes: str) -> bool:
        """Whether remembered slot tables are for these ranks, slots and homes."""
        current = self._current.placements
        if homes != self._homes or [table.shape for table in tables] != [p.slots.shape for p in current]:
            return False
        if homes == "sharded":
            return True
        owners = [chunk_owners(self._placed_for.shape[1], len(group)) for group in self._groups]
        return all(begins_with_owned(Placement(table), own) for table, own in zip(tables, owners, strict=True))

    def _work_out(self, number: int, expected: np.ndarray, recent: list[np.ndarray], hedge: int) -> Version:
        return version_of(number, [self._place(at, expected, recent, hedge) for at in range(len(self._groups))])

    def _place(self, at: int, expected: np.ndarray, recent: list[np.ndarray], hedge: int) -> Placement:
        """The layout of one token group."""
        ranks, room, config = len(self._groups[at]), self._slots[at], self._config
        if self._homes == "sharded":
            return fsep_placement(expected[at], ranks, room, self._ranks_per_node, hedge_permille=hedge)
        return replica_placement(
            expected[at],
            chunk_owners(expected.shape[1], ranks),
            ranks,
            room,
            self._ranks_per_node,
            recent=[loads[at] for loads in recent],
            capacity_factor=config.capacity_factor,
            min_tokens_per_gemm=config.min_tokens_per_gemm,
            imbalance_threshold=config.imbalance_threshold,
            cost=None if config.imbalance_threshold is not None else self._cost,
            ahead=config.prefetch,
            hedge_permille=hedge,
        )


def version_of(number: int, placements: list[Placement]) -> Version:
    """The version with its digest."""
    sha = hashlib.sha256()
    for placement in placements:
        sha.update(np.ascontiguousarray(placement.slots).tobytes())
    return Version(number, placements, int.from_bytes(sha.digest()[:7], "little"))
