"""Experts that live whole with an owner, and replicas of them ahead of need: ``fsep+llep`` without FSEP's price.

Every rank computes its own experts where they live. Further slots get replicas by the forecast, which travel under the
layer before; the tokens are split exactly over all of these by the loads that are really there, and what is left is
spilled as LLEP does it. A slot stays empty unless its replica is worth its way: where nothing is to be gained, nothing
travels that ``ep`` would not send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .at_home import spilling_plans
from .cost import CostModel
from .forecast import HEDGE
from .guard import cheapest, predicted_seconds
from .laer import hedged
from .llep import llep
from .owners import owner_slots
from .pinned import with_replicas
from .spill import level_and_spilled
from .types import EMPTY, Placement, Plan
from .validate import check_history, check_owners, check_room, node_width

# How often the number of replicas is halved before none at all is tried.
HALVINGS = 3
# More replicas must promise so much less time, as they cost what is not modelled: kernels, and memory.
WORTH = 1.005
# So many of the latest micro-batches are to be served well, beside the forecast. With two rather than four, up to four
# times as many weights had to be spilled where loads change much.
RECENT = 4


def llep_ahead(
    loads: np.ndarray,
    owners: np.ndarray,
    placement: Placement,
    *,
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    imbalance_threshold: float = 1.0,
    ranks_per_node: int | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """Splits exactly over owners and foreseen replicas, then spills as LLEP (arXiv 2601.17111) does.

    Args:
        loads: int64 ``[N, E]``, tokens per source rank and expert.
        owners: int64 ``[E]``.
        placement: Of :func:`replica_placement`: each rank's slots begin with its own experts.
        capacity_factor: As :func:`llep`.
        min_tokens_per_gemm: As :func:`llep`.
        imbalance_threshold: As :func:`llep`, where there are no replicas.
        ranks_per_node: As :func:`llep`.
        cost: If given, the plan is not predicted to take longer than :func:`ep`'s or :func:`llep`'s.

    Returns:
        Without replicas :func:`llep`'s plan; else one whose slot rows begin with the placement's, unless the cost model
        prefers to do without them. ``spilled`` counts tokens in slots that were not foreseen.

    Raises:
        ValueError: As :func:`llep` and :func:`fsep_llep`.
    """
    spill: dict[str, Any] = {
        "capacity_factor": capacity_factor,
        "min_tokens_per_gemm": min_tokens_per_gemm,
        "ranks_per_node": ranks_per_node,
    }
    replicas = int((placement.slots != EMPTY).sum()) > len(owners)
    if cost is None:
        if replicas:
            return level_and_spilled(loads, placement, **spill)[1]
        return llep(loads, owners, imbalance_threshold=imbalance_threshold, **spill)
    alone = spilling_plans(loads, owners, imbalance_threshold=imbalance_threshold, **spill)
    if not replicas:
        return cheapest(alone, loads, cost, home="whole", owners=owners)
    told: dict[str, Any] = {"home": "whole", "owners": owners}
    some = level_and_spilled(loads, placement, **spill)
    seconds = predicted_seconds(some, loads, cost, foreseen=placement, **told)
    seconds += predicted_seconds(alone, loads, cost, **told)
    return (*some, *alone)[seconds.index(min(seconds))]


def replica_placement(
    expected: np.ndarray,
    owners: np.ndarray,
    num_ranks: int,
    slots_per_rank: int,
    ranks_per_node: int | None = None,
    *,
    recent: Sequence[np.ndarray] = (),
    capacity_factor: float = 1.0,
    min_tokens_per_gemm: int = 1024,
    imbalance_threshold: float | None = None,
    cost: CostModel | None = None,
    ahead: bool = True,
    hedge_permille: int = HEDGE,
) -> Placement:
    """Each rank's own experts, and replicas that level the loads which are expected, as few as are worth it.

    Replicas go, one after the other, to the expert with the most load per copy, on the node with the fewest copies of
    it, there to the least loaded rank (LAER's rule, arXiv 2602.11686, for copies that are already placed). How many:
    of all that fit, half, a quarter, an eighth and none, those with which the expected and the recent loads take the
    least predicted time, or, without a cost model, leave the least to spill; where two are alike, the fewer.

    Args:
        expected: int64 ``[E]``, the forecast.
        owners: int64 ``[E]``.
        num_ranks: N.
        slots_per_rank: S, room on each rank, its own experts included.
        ranks_per_node: Consecutive ranks that share a node; ``None``: one node.
        recent: int64 ``[E]`` each, further loads that are to be served well.
        capacity_factor: Of the spilling that follows, as in :func:`llep`.
        min_tokens_per_gemm: Likewise.
        imbalance_threshold: While max/mean of the owners' expected loads is below it, there are no replicas.
        cost: Layer and machine.
        ahead: Whether replicas travel under the layer before, or delay their own.
        hedge_permille: As :func:`fsep_placement`.

    Returns:
        A slot table ``[N, S]``; slots that are not worth it are empty.

    Raises:
        ValueError: Bad loads or owners, or more own experts than slots.
    """
    load = check_history(np.asarray(expected), num_ranks).sum(axis=0)
    owners = check_owners(owners, num_ranks, len(load))
    check_room(len(load), num_ranks, slots_per_rank)
    slots, width = min(int(slots_per_rank), len(load)), node_width(ranks_per_node, num_ranks)
    own = np.bincount(owners, minlength=num_ranks)
    if own.max() > slots:
        raise ValueError(f"rank {own.argmax()} owns {own.max()} experts, which {slots} slots do not hold")
    alone = Placement(with_replicas(load, owners, num_ranks, slots, width, 0))
    native = np.bincount(owners, load, num_ranks)
    room = int((slots - own).sum())
    if room == 0 or not native.any():
        return alone
    if imbalance_threshold is not None and native.max() * num_ranks < imbalance_threshold * native.sum():
        return alone
    copies_for = hedged(load[None], int(hedge_permille))[0]
    seen = [_spread(one, num_ranks) for one in (load, *recent)]
    spill: dict[str, Any] = {
        "capacity_factor": capacity_factor,
        "min_tokens_per_gemm": min_tokens_per_gemm,
        "ranks_per_node": width,
    }

    def price(placement: Placement | None) -> float:
        total = 0.0
        for loads in seen:
            if placement is None:
                plans = spilling_plans(loads, owners, **spill)
            else:
                plans = level_and_spilled(loads, placement, **spill, halvings=0)
            if cost is None:
                # Of those that spill the first, if any does.
                total += plans[:2][-1].spilled
            else:
                known = placement if ahead else None
                total += min(predicted_seconds(plans, loads, cost, home="whole", owners=owners, foreseen=known))
        return total

    best, least = alone, price(None)
    for halved in range(HALVINGS, -1, -1):
        if least > 0 and room >> halved:
            tried = Placement(with_replicas(copies_for, owners, num_ranks, slots, width, room >> halved))
            found = price(tried)
            if found * WORTH < least:
                best, least = tried, found
    return best


def used(placement: Placement, plan: Plan) -> Placement | None:
    """``placement``, if the slots of ``plan`` begin with it, so that what was sent ahead is what it needs."""
    known, slots = placement.slots, plan.placement.slots
    if known.shape[1] > slots.shape[1] and (known[:, slots.shape[1] :] != EMPTY).any():
        return None
    known = known[:, : slots.shape[1]]
    return placement if ((known == EMPTY) | (known == slots[:, : known.shape[1]])).all() else None


def begins_with_owned(placement: Placement, owners: np.ndarray) -> bool:
    """Whether each rank's slots begin with its own experts, ascending."""
    slots, _ = owner_slots(owners, placement.num_ranks, np.zeros(placement.num_ranks, np.int64))
    width = slots.shape[1]
    return placement.slots.shape[1] >= width and bool(((slots == EMPTY) | (placement.slots[:, :width] == slots)).all())


def _spread(load: np.ndarray, ranks: int) -> np.ndarray:
    """int64 ``[N, E]``: the tokens of each expert, from all ranks alike."""
    return load // ranks + (np.arange(ranks)[:, None] < load % ranks)
