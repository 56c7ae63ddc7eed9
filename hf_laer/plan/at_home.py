"""LLEP whose tokens stay where they are: an overloaded rank's experts go to the ranks that their tokens come from.

LLEP (arXiv 2601.17111) spills an expert in large chunks to the least loaded ranks: few weights travel, and a token
whose experts are all hot is sent to several ranks. Here a rank gets the hot experts that it has many tokens for and
keeps these, as FasterMoE's shadowing does for whole experts (PPoPP'22): more weights travel, and fewer tokens, four
times in a step. Which is faster depends on the sizes, so the cost model has to say.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .chunks import add_chunks, chunks_above
from .fixed import at_owners
from .llep import Limits, limits, spilling
from .order import descending
from .owners import owner_slots
from .ranges import stream_ranges
from .types import Placement, Plan, Split


def llep_at_home(
    loads: np.ndarray,
    owners: np.ndarray,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    ranks_per_node: int | None = None,
) -> Plan:
    """Least-loaded expert parallelism (arXiv 2601.17111) that spills tokens to their own rank first.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``, the rank that owns each expert.
        capacity_factor: Alpha, as for :func:`llep`.
        min_tokens_per_gemm: m; with fewer tokens of an expert a rank does not fetch it.
        ranks_per_node: Where a rank's own tokens do not do, helpers on the owner's node come first.

    Returns:
        A plan as :func:`llep`'s, with the same bound on loads; a replica is listed once per range that it serves, its
        own rank's tokens before others'.

    Raises:
        ValueError: As :func:`llep`.
    """
    return _at_home(limits(loads, owners, capacity_factor, min_tokens_per_gemm, ranks_per_node))


def _at_home(limit: Limits) -> Plan:
    kept = limit._replace(totals=limit.totals.copy(), native=limit.native.copy())
    slots, first, rank, slot, end, spilled = _spill(*kept)
    return Plan(Placement(slots), Split(first, rank, slot, end), spilled=int(spilled))


def spilling_plans(
    loads: np.ndarray,
    owners: np.ndarray,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    imbalance_threshold: float = 1.0,
    ranks_per_node: int | None = None,
) -> tuple[Plan, ...]:
    """What a cost model has to choose from where experts live whole: :func:`ep`'s plan, and where something is to be
    spilled :func:`llep`'s and :func:`llep_at_home`'s too; for arguments and errors see these.
    """
    limit = limits(loads, owners, capacity_factor, min_tokens_per_gemm, ranks_per_node)
    plan, plain = spilling(limit, imbalance_threshold), at_owners(limit.loads, limit.owners)
    return (plain,) if plan is None else (plain, plan, _at_home(limit))


@kernel
def _spill(
    loads: np.ndarray, owners: np.ndarray, totals: np.ndarray, native: np.ndarray, capacity: int, least: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Slot table, split (first, rank, slot, end), and the tokens that leave their owner."""
    slots, slot_of = owner_slots(owners, len(native), np.zeros_like(native))
    kept = _kept(loads, owners, totals, native, capacity, least)
    rest = chunks_above(owners, totals, native, capacity, least, width)
    expert, helper, tokens = _joined(kept[0], rest[0]), _joined(kept[1], rest[1]), _joined(kept[2], rest[2])
    each = np.arange(len(owners) + 1)
    table, first, rank, slot, quota, spilled = add_chunks(slots, each, owners, slot_of, totals, expert, helper, tokens)
    first, rank, slot, end = stream_ranges(loads, first, rank, slot, quota, width)
    return table, first, rank, slot, end, spilled


@kernel
def _kept(
    loads: np.ndarray, owners: np.ndarray, totals: np.ndarray, held: np.ndarray, capacity: int, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts that ranks fetch for their own tokens, most tokens first: expert, rank and tokens, ``[C]``.

    What they keep is taken off ``totals`` and the owners' ``held``.
    """
    ranks, experts = loads.shape
    hot = np.empty(ranks * experts, np.int64)
    found = 0
    for expert in range(experts):
        owner = owners[expert]
        for source in range(ranks if held[owner] >= capacity + least else 0):
            if source != owner and loads[source, expert] >= least:
                hot[found] = expert * ranks + source
                found += 1
    sizes = np.empty(found, np.int64)
    for at in range(found):
        sizes[at] = loads[hot[at] % ranks, hot[at] // ranks]
    expert_of, rank_of, tokens = np.empty(found, np.int64), np.empty(found, np.int64), np.empty(found, np.int64)
    count = 0
    for at in descending(sizes):
        expert, source = hot[at] // ranks, hot[at] % ranks
        owner = owners[expert]
        take = min(sizes[at], held[owner] - capacity, capacity - held[source])
        if take >= least:
            expert_of[count], rank_of[count], tokens[count] = expert, source, take
            count += 1
            totals[expert] -= take
            held[owner] -= take
            held[source] += take
    return expert_of[:count], rank_of[:count], tokens[:count]


@kernel
def _joined(some: np.ndarray, more: np.ndarray) -> np.ndarray:
    both = np.empty(len(some) + len(more), np.int64)
    both[: len(some)] = some
    both[len(some) :] = more
    return both
