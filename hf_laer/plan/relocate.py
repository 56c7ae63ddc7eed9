"""Layouts that change step by step because experts live where they compute: SmartMoE's owners, FlexMoE's
copies.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .fixed import ep
from .shares import even_split
from .types import EMPTY, Placement, Plan
from .validate import check_history, check_owners, check_placement


def smartmoe_owners(loads: np.ndarray, owners: np.ndarray, num_ranks: int) -> np.ndarray:
    """SmartMoE's relocation (USENIX ATC'23): owners after swaps that lower the busiest rank's load.

    Each round swaps one expert of the busiest rank with one of another rank (or moves it where a rank owns
    fewer than ``ceil(E / N)``), the exchange that leaves the lower maximum of the two; until none helps. Few
    experts move, which matters as optimizer state moves along.

    Args:
        loads: int64 ``[E]`` or ``[N, E]``, recent loads.
        owners: int64 ``[E]``, the present owners.
        num_ranks: N.

    Returns:
        int64 ``[E]``: the new owners; no rank owns more than before or than ``ceil(E / N)``.

    Raises:
        ValueError: Bad loads or owners.
    """
    load = check_history(loads, num_ranks).sum(axis=0)
    return _swap(load, check_owners(owners, num_ranks, len(load)).copy(), num_ranks)


def smartmoe(loads: np.ndarray, owners: np.ndarray) -> Plan:
    """SmartMoE's dispatch (USENIX ATC'23): every token to its expert's present owner, as :func:`ep`."""
    return ep(loads, owners)


def flexmoe_placement(loads: np.ndarray, placement: Placement, *, rounds: int = 10, move_tokens: int = 0) -> Placement:
    """FlexMoE's adjustment (SIGMOD'23, arXiv 2304.03946): copies move from cold experts to hot ones, few a
    step.

    Each round takes a copy of the expert with the least load per copy (on the least loaded rank that lacks
    the hot expert) and gives its slot to the expert with the most; kept while the busiest rank's even share
    falls by more than ``move_tokens``, the price of moving an expert with its optimizer state.

    Raises:
        ValueError: Bad loads or placement, or negative ``rounds`` or ``move_tokens``.
    """
    if rounds < 0 or move_tokens < 0:
        raise ValueError(f"rounds={rounds} and move_tokens={move_tokens} must not be negative")
    ranks = placement.num_ranks
    load = check_history(loads, ranks).sum(axis=0)
    slots = check_placement(placement, ranks, len(load))
    return Placement(_exchange(load, slots.copy(), int(rounds), int(move_tokens)))


def flexmoe(loads: np.ndarray, placement: Placement) -> Plan:
    """FlexMoE's dispatch (arXiv 2304.03946): copies share an expert evenly. See :func:`even_split` for
    errors.
    """
    return Plan(placement, even_split(loads, placement))


@kernel
def _swap(load: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    experts = len(load)
    each = -(-experts // ranks)
    held = np.zeros(ranks, np.int64)
    count = np.zeros(ranks, np.int64)
    for expert in range(experts):
        held[owners[expert]] += load[expert]
        count[owners[expert]] += 1
    for _ in range(experts):
        busiest = held.argmax()
        lowest = held[busiest]
        leaves, comes, target = -1, -1, -1
        for expert in range(experts):
            if owners[expert] != busiest:
                continue
            for other in range(experts + ranks):  # beyond the experts: a rank with room
                rank = owners[other] if other < experts else other - experts
                back = load[other] if other < experts else 0
                if rank == busiest or (other >= experts and count[rank] >= each):
                    continue
                gain = load[expert] - back
                after = max(held[busiest] - gain, held[rank] + gain)
                if gain > 0 and after < lowest:
                    lowest, leaves, target = after, expert, rank
                    comes = other if other < experts else -1
        if leaves < 0:
            break
        gain = load[leaves] - (load[comes] if comes >= 0 else 0)
        held[busiest] -= gain
        held[target] += gain
        owners[leaves] = target
        if comes >= 0:
            owners[comes] = busiest
        else:
            count[busiest] -= 1
            count[target] += 1
    return owners


@kernel
def _exchange(load: np.ndarray, slots: np.ndarray, rounds: int, move_tokens: int) -> np.ndarray:
    experts = len(load)
    copies = np.zeros(experts, np.int64)
    for row in slots:
        for expert in row:
            if expert != EMPTY:
                copies[expert] += 1
    highest = _shared(load, slots, copies).max()
    for _ in range(rounds):
        hot, cold = -1, -1
        for expert in range(experts):
            if copies[expert] == 0:
                continue
            if hot < 0 or load[expert] * copies[hot] > load[hot] * copies[expert]:
                hot = expert
            if copies[expert] > 1 and (cold < 0 or load[expert] * copies[cold] < load[cold] * copies[expert]):
                cold = expert
        if cold < 0 or hot == cold:
            break
        rank, slot = _seat(_shared(load, slots, copies), slots, hot, cold)
        if rank < 0:
            break
        slots[rank, slot] = hot
        copies[hot] += 1
        copies[cold] -= 1
        then = _shared(load, slots, copies).max()
        if then + move_tokens >= highest:
            slots[rank, slot] = cold
            break
        highest = then
    return slots


@kernel
def _shared(load: np.ndarray, slots: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Tokens per rank at even shares, rounded up per copy."""
    held = np.zeros(slots.shape[0], np.int64)
    for rank in range(slots.shape[0]):
        for expert in slots[rank]:
            if expert != EMPTY:
                held[rank] += -(-load[expert] // copies[expert])
    return held


@kernel
def _seat(held: np.ndarray, slots: np.ndarray, hot: int, cold: int) -> tuple[int, int]:
    """The slot of ``cold`` on the least loaded rank that lacks ``hot``, or -1, -1."""
    rank_of, slot_of = -1, -1
    for rank in range(slots.shape[0]):
        at = -1
        for slot in range(slots.shape[1]):
            if slots[rank, slot] == hot:
                at = -1
                break
            if slots[rank, slot] == cold:
                at = slot
        if at >= 0 and (rank_of < 0 or held[rank] < held[rank_of]):
            rank_of, slot_of = rank, at
    return rank_of, slot_of
