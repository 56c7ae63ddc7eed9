"""LLEP: owners compute up to a capacity, the rest spills to the least loaded ranks (arXiv 2601.17111).

The published algorithm, LLA with its helper LLAS, has corners which this one avoids: the capacity is rounded up, so
that the ranks together always have room for every token, and a rank may exceed it by a little (see :mod:`.chunks`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .chunks import add_chunks, chunks_above
from .cost import CostModel, predict
from .fixed import at_owners
from .guard import no_worse_than_ep
from .owners import owner_loads, owner_slots
from .ranges import ends
from .types import Placement, Plan, Split
from .validate import check_loads, check_owners, node_width


class Limits(NamedTuple):
    """What a rank may hold, and what is there.

    Args:
        loads: int64 ``[N, E]``.
        owners: int64 ``[E]``.
        totals: int64 ``[E]``, tokens of each expert.
        native: int64 ``[N]``, tokens of each rank's own experts.
        capacity: Tokens that a rank may hold.
        least: Tokens that are worth a transfer.
        width: Ranks of a node.
    """

    loads: np.ndarray
    owners: np.ndarray
    totals: np.ndarray
    native: np.ndarray
    capacity: int
    least: int
    width: int


def limits(
    loads: np.ndarray,
    owners: np.ndarray,
    capacity_factor: float,
    min_tokens_per_gemm: int,
    ranks_per_node: int | None,
) -> Limits:
    """Checks what :func:`llep` is given, and works out what follows from it.

    Raises:
        ValueError: Bad loads or owners, alpha below 1, or m below 1.
    """
    if not (math.isfinite(capacity_factor) and capacity_factor >= 1):
        raise ValueError(f"capacity_factor={capacity_factor} must be a finite number of at least 1")
    if min_tokens_per_gemm < 1:
        raise ValueError(f"min_tokens_per_gemm={min_tokens_per_gemm} must be at least 1")
    loads = check_loads(loads)
    ranks, experts = loads.shape
    owners = check_owners(owners, ranks, experts)
    width = node_width(ranks_per_node, ranks)
    totals, native = owner_loads(loads, owners)
    total = sum(native.tolist())
    above, below = float(capacity_factor).as_integer_ratio()
    capacity = min(-(-above * total // (below * ranks)), total)
    return Limits(loads, owners, totals, native, capacity, min(int(min_tokens_per_gemm), max(total, 1)), width)


def llep(
    loads: np.ndarray,
    owners: np.ndarray,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    imbalance_threshold: float = 1.3,
    ranks_per_node: int | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """Least-loaded expert parallelism: spill what exceeds an owner's capacity (LLEP, arXiv 2601.17111).

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``, the rank that owns each expert.
        capacity_factor: Alpha; a rank's capacity is ``ceil(alpha * total / N)`` tokens.
        min_tokens_per_gemm: m; smaller chunks are not worth a weight transfer.
        imbalance_threshold: Lambda; while max/mean over ranks is below it, the plan is :func:`ep`'s.
        ranks_per_node: Helpers on the owner's node come first; ``None`` means one node.
        cost: If given, plans carry a prediction, and one that is predicted slower than :func:`ep` is
            replaced by it: spilling does not pay where batches are small.

    Returns:
        A plan whose slot rows list the rank's own experts ascending (also those without a token), then those
        it helps with. Loads stay at or below capacity + m - 1. ``spilled`` counts tokens computed away from
        their owner. Replicas of one expert are in rank order, which leaves many tokens on their source rank.

    Raises:
        ValueError: Bad loads or owners, alpha or lambda below 1, or m below 1.
    """
    limit = limits(loads, owners, capacity_factor, min_tokens_per_gemm, ranks_per_node)
    plan = spilling(limit, imbalance_threshold)
    if plan is None:
        plain = at_owners(limit.loads, limit.owners)
        return plain if cost is None else predict(plain, limit.loads, cost, home="whole", owners=limit.owners)
    return plan if cost is None else no_worse_than_ep(plan, limit.loads, limit.owners, cost, home="whole")


def spilling(limit: Limits, imbalance_threshold: float) -> Plan | None:
    """:func:`llep`'s plan, or ``None`` where that is :func:`ep`'s; for the threshold and its errors see there."""
    if not (math.isfinite(imbalance_threshold) and imbalance_threshold >= 1):
        raise ValueError(f"imbalance_threshold={imbalance_threshold} must be a finite number of at least 1")
    held = limit.native.tolist()
    total, hottest = sum(held), max(held)
    # Fractions of whole numbers: every rank rounds alike.
    above, below = float(imbalance_threshold).as_integer_ratio()
    balanced = hottest * len(held) * below < above * total
    if balanced or hottest < limit.capacity + limit.least:
        return None
    slots, first, rank, slot, end, away = _spill(
        limit.owners, limit.totals.copy(), limit.native.copy(), limit.capacity, limit.least, limit.width
    )
    return Plan(Placement(slots), Split(first, rank, slot, end), spilled=int(away))


@kernel
def _spill(
    owners: np.ndarray, totals: np.ndarray, native: np.ndarray, capacity: int, least: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Slot table, split (first, rank, slot, end), and the tokens that leave their owner."""
    slots, slot_of = owner_slots(owners, len(native), np.zeros_like(native))
    expert, helper, tokens = chunks_above(owners, totals, native, capacity, least, width)
    each = np.arange(len(owners) + 1)
    table, first, rank, slot, quota, spilled = add_chunks(slots, each, owners, slot_of, totals, expert, helper, tokens)
    return table, first, rank, slot, ends(first, quota), spilled
