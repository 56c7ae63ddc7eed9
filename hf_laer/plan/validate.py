"""The one gate for what planners are given: everything behind it is int64, contiguous and in range."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .types import EMPTY, Placement

# Planners compare load/replicas by cross products, so total * ranks has to stay well inside int64.
LARGEST_PRODUCT = 2**62


def check_loads(loads: np.ndarray, num_ranks: int | None = None) -> np.ndarray:
    """Tokens per source rank and expert as int64 ``[N, E]``, C-contiguous.

    Args:
        loads: ``[N, E]`` integers, or floats with whole values.
        num_ranks: The ranks to plan for; ``None`` means N.

    Raises:
        ValueError: Wrong shape, NaN, infinite, fractional or negative values, or a total beyond int64
            arithmetic.
    """
    loads = np.asarray(loads)
    if loads.ndim != 2 or 0 in loads.shape:
        raise ValueError(f"loads must be [ranks, experts] with at least one of each, got shape {loads.shape}")
    loads = _whole_numbers("loads", loads)
    ranks = loads.shape[0] if num_ranks is None else max(int(num_ranks), 1)
    negative, fits = _scan(loads, (LARGEST_PRODUCT - 1) // ranks)
    if negative >= 0:
        rank, expert = divmod(negative, loads.shape[1])
        raise ValueError(f"loads must not be negative: rank {rank}, expert {expert} has {loads[rank, expert]}")
    if not fits:
        total = sum(map(int, loads.ravel()))
        raise ValueError(f"loads sum to {total} on {ranks} ranks: total * ranks must stay below 2**62")
    return loads


@kernel
def _scan(loads: np.ndarray, limit: int) -> tuple[int, bool]:
    """The position of the first negative load or -1, and whether the sum is within ``limit``."""
    lowest, highest, total = 0, 0, 0
    for load in loads.flat:
        lowest, highest = min(lowest, load), max(highest, load)
    if lowest < 0:
        for at, load in enumerate(loads.flat):
            if load < 0:
                return at, True
    if highest > limit // loads.size:
        for load in loads.flat:
            if load > limit - total:
                return -1, False
            total += load
    return -1, True


def check_history(loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Recent loads as int64 ``[N, E]``; ``[E]`` (sources unknown) becomes one row, ``[1, E]``.

    Raises:
        ValueError: As :func:`check_loads`, or ``[M, E]`` whose ``M`` is not ``num_ranks``.
    """
    loads = np.asarray(loads)
    if loads.ndim == 1:
        return check_loads(loads[None, :], num_ranks)
    loads = check_loads(loads)
    if loads.shape[0] != num_ranks:
        raise ValueError(f"loads come from {loads.shape[0]} ranks, the placement is for {num_ranks}")
    return loads


def check_owners(owners: np.ndarray, num_ranks: int, num_experts: int) -> np.ndarray:
    """The rank that owns each expert as int64 ``[E]``.

    Raises:
        ValueError: Not one whole number in ``[0, num_ranks)`` per expert.
    """
    owners = np.asarray(owners)
    if owners.shape != (num_experts,):
        raise ValueError(f"owners must name one rank for each of {num_experts} experts, got shape {owners.shape}")
    owners = _whole_numbers("owners", owners)
    if not _within(owners, num_ranks):
        raise ValueError(f"owners must lie in 0..{num_ranks - 1}, got {owners.min()}..{owners.max()}")
    return owners


@kernel
def _within(values: np.ndarray, limit: int) -> bool:
    """Whether all lie in ``[0, limit)``."""
    lowest, highest = 0, 0
    for value in values:
        lowest, highest = min(lowest, value), max(highest, value)
    return lowest >= 0 and highest < limit


def check_placement(placement: Placement, num_ranks: int, num_experts: int) -> np.ndarray:
    """The slot table as int64 ``[N, S]``.

    Raises:
        ValueError: Wrong number of ranks, an expert that does not exist, or one that a rank holds twice.
    """
    slots = np.ascontiguousarray(placement.slots, np.int64)
    if slots.ndim != 2 or slots.shape[0] != num_ranks or slots.shape[1] < 1:
        raise ValueError(f"placement must be [{num_ranks} ranks, slots], got shape {slots.shape}")
    rank, expert = _first_fault(slots, num_experts)
    if expert == num_experts:
        raise ValueError(f"slots must hold {EMPTY} or 0..{num_experts - 1}, got {slots.min()}..{slots.max()}")
    if expert >= 0:
        raise ValueError(f"rank {rank} holds expert {expert} in more than one slot")
    if rank >= 0:
        raise ValueError(f"empty slots must trail, rank {rank} has {slots[rank].tolist()}")
    return slots


@kernel
def _first_fault(slots: np.ndarray, experts: int) -> tuple[int, int]:
    """The first rank with no expert and ``experts``, with one twice and that one, with a hole and -1; or -1 and -1."""
    newest = np.full(experts, -1, np.int64)
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            expert = slots[rank, slot]
            if expert < EMPTY or expert >= experts:
                return rank, experts
            if expert >= 0 and newest[expert] == rank:
                return rank, expert
            if expert >= 0:
                newest[expert] = rank
                if slot > 0 and slots[rank, slot - 1] < 0:
                    return rank, -1
    return -1, -1


def check_room(num_experts: int, num_ranks: int, slots: int) -> None:
    """Raises ``ValueError`` unless ``slots`` on each of ``num_ranks`` ranks hold every expert once."""
    for name, value in (("num_experts", num_experts), ("num_ranks", num_ranks), ("slots", slots)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_ranks * slots < num_experts:
        raise ValueError(
            f"{slots} slots on each of {num_ranks} ranks hold {num_ranks * slots} experts, "
            f"there are {num_experts}: give {-(-num_experts // num_ranks)} or more"
        )


def node_width(ranks_per_node: int | None, num_ranks: int) -> int:
    """Ranks of one node, ``num_ranks`` where all share one; the last node may have fewer."""
    if ranks_per_node is None:
        return num_ranks
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node} must be at least 1")
    return min(int(ranks_per_node), num_ranks)


def _whole_numbers(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype == np.int64:
        return np.ascontiguousarray(values)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite, got {values[~np.isfinite(values)][0]}")
        if (values != np.floor(values)).any():
            raise ValueError(f"{name} must be whole numbers, got {values[values != np.floor(values)][0]}")
        if np.abs(values).max() >= 2.0**62:
            raise ValueError(f"{name} must stay below 2**62, got {np.abs(values).max()}")
    elif values.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got dtype {values.dtype}")
    elif values.dtype.kind == "u" and values.max() >= 2**62:
        raise ValueError(f"{name} must stay below 2**62, got {values.max()}")
    return np.ascontiguousarray(values, np.int64)
