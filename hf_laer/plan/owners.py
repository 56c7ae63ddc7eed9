"""Who owns an expert: the rank that keeps its parameters and collects its gradient."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .types import EMPTY


def chunk_owners(num_experts: int, num_ranks: int) -> np.ndarray:
    """The owner of each expert, int64 ``[E]``, by the rule of ``torch.chunk`` and so of DTensor's
    ``Shard(0)``.

    Chunks hold ``ceil(E / N)`` experts: 30 experts on 8 ranks are 4 on each of seven ranks and 2 on the last;
    with 9 experts on 8 ranks the last three ranks own none.

    Raises:
        ValueError: Fewer than one expert or rank.
    """
    if num_experts < 1 or num_ranks < 1:
        raise ValueError(f"need at least one expert and one rank, got {num_experts} experts on {num_ranks} ranks")
    return np.arange(num_experts, dtype=np.int64) // -(-num_experts // num_ranks)


@kernel
def owner_loads(loads: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each expert and of each owner's experts, int64 ``[E]`` and ``[N]``."""
    ranks, experts = loads.shape
    totals, held = np.zeros(experts, np.int64), np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for expert in range(experts):
            totals[expert] += loads[rank, expert]
    for expert in range(experts):
        held[owners[expert]] += totals[expert]
    return totals, held


@kernel
def owner_slots(owners: np.ndarray, num_ranks: int, spare: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slot table with each rank's own experts ascending, and each expert's slot at its owner.

    ``spare``, int64 ``[N]``, is further room on each rank, left ``EMPTY``. Returns ``[N, S]`` and ``[E]``.
    """
    used = np.zeros(num_ranks, np.int64)
    slot_of = np.empty(len(owners), np.int64)
    for expert in range(len(owners)):
        slot_of[expert] = used[owners[expert]]
        used[owners[expert]] += 1
    slots = np.full((num_ranks, (used + spare).max()), EMPTY, np.int64)
    for expert in range(len(owners)):
        slots[owners[expert], slot_of[expert]] = expert
    return slots, slot_of
