"""Copies beside the owner that serve their own rank's tokens: FasterMoE's shadows and Prophet's partial
copies.

Both weigh tokens saved on the busiest rank against expert transfers; ``transfer_tokens`` says how many
tokens' compute one expert's transfer is worth (see ``CostModel.transfer_tokens``), so that decisions stay in
integers.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .order import descending
from .owners import owner_loads, owner_slots
from .shares import own_copy_first
from .types import EMPTY, Placement, Plan
from .validate import check_loads, check_owners


def fastermoe(loads: np.ndarray, owners: np.ndarray, *, transfer_tokens: int) -> Plan:
    """FasterMoE's dynamic shadowing (PPoPP'22, doi 10.1145/3503221.3508418): hot experts go everywhere.

    The next hottest expert is copied to all ranks, each then computing its own tokens, while the modelled
    time falls. Decided on the very loads that it serves.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``.
        transfer_tokens: Tokens that one expert transfer is worth; a broadcast costs two.

    Raises:
        ValueError: Bad loads or owners, or negative ``transfer_tokens``.
    """
    loads, owners = _checked(loads, owners, transfer_tokens)
    wanted = _shadows(loads, owners, int(transfer_tokens))
    return own_copy_first(loads, Placement(_with_copies(owners, wanted)), owners)


def prophet_placement(loads: np.ndarray, owners: np.ndarray, *, transfer_tokens: int) -> Placement:
    """Prophet's placement (arXiv 2411.10003): the busiest rank's hottest expert is copied to part of the
    ranks.

    The ranks with most tokens for it, as many (1, 2, 4, ... N - 1) as make the modelled time lowest; again
    until it no longer falls. Made of the last step's loads, as Prophet forecasts by locality.

    Raises:
        ValueError: As :func:`fastermoe`.
    """
    loads, owners = _checked(loads, owners, transfer_tokens)
    return Placement(_with_copies(owners, _partial_copies(loads, owners, int(transfer_tokens))))


def prophet(loads: np.ndarray, placement: Placement, owners: np.ndarray) -> Plan:
    """Prophet's dispatch (arXiv 2411.10003): ranks with a copy serve their own tokens, the owner all others.

    See :func:`own_copy_first` for errors.
    """
    return own_copy_first(loads, placement, owners)


def _checked(loads: np.ndarray, owners: np.ndarray, transfer_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    if transfer_tokens < 0:
        raise ValueError(f"transfer_tokens={transfer_tokens} must not be negative")
    loads = check_loads(loads)
    return loads, check_owners(owners, *loads.shape)


@kernel
def _with_copies(owners: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Slots: each rank's own experts, then the copies that ``wanted`` bool ``[N, E]`` asks for, ascending."""
    ranks, experts = wanted.shape
    spare = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        spare[rank] = wanted[rank].sum()
    slots, _ = owner_slots(owners, ranks, spare)
    used = np.bincount(owners, minlength=ranks)
    for rank in range(ranks):
        for expert in range(experts):
            if wanted[rank, expert]:
                slots[rank, used[rank]] = expert
                used[rank] += 1
    return slots


@kernel
def _shadows(loads: np.ndarray, owners: np.ndarray, transfer_tokens: int) -> np.ndarray:
    ranks, experts = loads.shape
    totals, held = owner_loads(loads, owners)
    wanted = np.zeros((ranks, experts), np.bool_)
    cost = held.max()
    for before, expert in enumerate(descending(totals)):
        then = held + loads[:, expert]
        then[owners[expert]] -= totals[expert]
        price = then.max() + 2 * transfer_tokens * (before + 1)
        if price >= cost:
            break
        held, cost = then, price
        wanted[:, expert] = True
        wanted[owners[expert], expert] = False
    return wanted


@kernel
def _partial_copies(loads: np.ndarray, owners: np.ndarray, transfer_tokens: int) -> np.ndarray:
    ranks, experts = loads.shape
    totals, held = owner_loads(loads, owners)
    wanted = np.zeros((ranks, experts), np.bool_)
    sent = np.zeros(ranks, np.int64)
    done = np.zeros(experts, np.bool_)
    cost = held.max()
    while True:
        busiest = held.argmax()
        hot = EMPTY
        for expert in range(experts):
            free = owners[expert] == busiest and not done[expert]
            if free and (hot == EMPTY or totals[expert] > totals[hot]):
                hot = expert
        if hot == EMPTY:
            return wanted
        done[hot] = True
        order = descending(loads[:, hot])
        order = order[order != busiest]
        best, best_cost = 0, cost
        count = 1
        while count <= len(order):
            then = held.copy()
            for rank in order[:count]:
                then[rank] += loads[rank, hot]
                then[busiest] -= loads[rank, hot]
            price = max(sent.max(), sent[busiest] + count) * transfer_tokens
            if then.max() + price < best_cost:
                best, best_cost = count, then.max() + price
            count = len(order) if count < len(order) < 2 * count else 2 * count
        if best == 0:
            return wanted
        for rank in order[:best]:
            held[rank] += loads[rank, hot]
            held[busiest] -= loads[rank, hot]
            wanted[rank, hot] = True
        sent[busiest] += best
        cost = best_cost
