"""What a planner decides: a placement (who holds which expert) and a split (which replica serves which tokens).

Letters in shapes: N ranks of one token group, E experts, S slots per rank, R replicas in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._jit import kernel

EMPTY = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Who holds which expert.

    Args:
        slots: int64 ``[N, S]``, the expert in each slot of each rank; empty slots are ``EMPTY`` and trail.
            A rank holds an expert at most once.
    """

    slots: np.ndarray

    @property
    def num_ranks(self) -> int:
        return int(self.slots.shape[0])

    def held_by(self, rank: int) -> np.ndarray:
        """int64 ``[S']``: the experts in the filled slots of ``rank``, in slot order."""
        row = self.slots[rank]
        return row[row != EMPTY]


@dataclass(frozen=True, eq=False)
class Split:
    """Which replica serves which tokens of each expert.

    The tokens of one expert form a stream: those of rank 0 first, then rank 1, and so on, each rank's in its own
    order. Replica ``j`` of the expert serves the positions from the end of replica ``j - 1`` up to its own. A
    replica that serves several ranges of the stream is listed once for each.

    Args:
        first: int64 ``[E + 1]``; the replicas of expert ``e`` are ``first[e]`` up to ``first[e + 1]``.
        rank: int64 ``[R]``, the rank that holds each replica.
        slot: int64 ``[R]``, its slot on that rank.
        end: int64 ``[R]``, one past the last stream position that the replica serves; cumulative in each expert,
            the last one equals the expert's load.
    """

    first: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    end: np.ndarray

    @property
    def num_experts(self) -> int:
        return len(self.first) - 1

    def quotas(self) -> np.ndarray:
        """int64 ``[R]``: tokens that each replica serves."""
        quota = np.diff(self.end, prepend=0)
        starts = self.first[:-1][np.diff(self.first) > 0]
        quota[starts] = self.end[starts]
        return quota

    def rank_loads(self, num_ranks: int) -> np.ndarray:
        """int64 ``[N]``: tokens that each rank computes."""
        return _rank_loads(self.first, self.rank, self.end, num_ranks)


@kernel
def _rank_loads(first: np.ndarray, rank: np.ndarray, end: np.ndarray, num_ranks: int) -> np.ndarray:
    loads = np.zeros(num_ranks, np.int64)
    for expert in range(len(first) - 1):
        begin = 0
        for at in range(first[expert], first[expert + 1]):
            loads[rank[at]] += end[at] - begin
            begin = end[at]
    return loads


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a plan is expected to cost for one layer and micro-batch (forward, and backward where trained).

    Args:
        seconds: compute + exchange + exposed weights, the slowest rank counting in each.
        compute_seconds: Expert products.
        exchange_seconds: Token exchanges.
        weights_exposed_seconds: Weight and gradient transfers that nothing covers, and experts moved for good.
        weights_hidden_seconds: Weight and gradient transfers under compute.
        bytes_in: float64 ``[N]``, bytes received by each rank, tokens and weights.
        bytes_out: float64 ``[N]``, bytes sent by each rank.
        peak_bytes: float64 ``[N]``, unsharded weights, gradients, rows and activations of the layer.
        foreign_tokens: Assignments (token, expert) computed on another node than their source's.
    """

    seconds: float
    compute_seconds: float
    exchange_seconds: float
    weights_exposed_seconds: float
    weights_hidden_seconds: float
    bytes_in: np.ndarray
    bytes_out: np.ndarray
    peak_bytes: np.ndarray
    foreign_tokens: int


@dataclass(frozen=True, eq=False)
class Plan:
    """One layer's decisions for one micro-batch, a pure function of numbers that all ranks hold.

    Args:
        placement: Who holds which expert.
        split: Which replica serves which tokens.
        spilled: Tokens that are computed away from their expert's owner (LLEP) or 0.
        predicted: What it is expected to cost, where a cost model was asked.
    """

    placement: Placement
    split: Split
    spilled: int = 0
    predicted: Prediction | None = None

    @property
    def rank_loads(self) -> np.ndarray:
        """int64 ``[N]``: tokens that each rank computes."""
        return self.split.rank_loads(self.placement.num_ranks)

    def digest(self) -> str:
        """A hash of every decision, equal on two ranks only if they would do the same."""
        split = self.split
        return digest_of(self.placement.slots, split.first, split.rank, split.slot, split.end)


def digest_of(*arrays: np.ndarray) -> str:
    """A hash of whole numbers and their shapes."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array, np.int64).tobytes())
        sha.update(str(array.shape).encode())
    return sha.hexdigest()


def imbalance(rank_loads: np.ndarray) -> float:
    """Max over mean of the loads of ranks (or experts); 1.0 where there are none."""
    total = int(rank_loads.sum())
    return 1.0 if total == 0 else float(rank_loads.max() * len(rank_loads) / total)


# Where the exact split over a layout levels the ranks this well, there is nothing left for another to win.
LEVEL = 1.01


def is_level(plans: Sequence[Plan]) -> bool:
    """Whether the layouts in use left nothing to win, so that they may stay."""
    return all(plan.spilled == 0 and imbalance(plan.rank_loads) <= LEVEL for plan in plans)
