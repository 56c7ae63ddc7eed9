"""What a plan costs: a roofline over products, links and weights, in which the slowest rank counts.

Only sums, products and quotients of float64, in a fixed order: every rank predicts the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .seconds import FIGURES, cost_figures, cost_parts, exchange_of
from .topology import Topology
from .traffic import Traffic
from .types import EMPTY, Placement, Plan, Prediction

HOMES = ("whole", "sharded", "copies", "resident", "shadowed")
RECOMPUTE = ("none", "experts", "layer")
_NO_SLOTS, _NO_OWNERS = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True)
class CostModel:
    """One MoE layer on one machine.

    Args:
        topology: The machine.
        hidden: H.
        intermediate: I.
        top_k: K, experts per token.
        gated: Three matrices per expert instead of two.
        value_bytes: Bytes of a weight or activation value in compute.
        training: Count backward and the gradients' way home, not just a forward.
        recompute: ``layer`` repeats dispatch, experts and combine in backward, ``experts`` the products
            alone.
        other_seconds: Forward time of the rest of a transformer layer, under which weights can travel too.
        max_rows_per_rank: The engine computes at most so many rows at a time, which bounds memory.
        reduce_bytes: Bytes of a weight gradient's value on its way; ``None`` means ``value_bytes``, 0 that weights are
            frozen and have no gradients.

    Raises:
        ValueError: A size is below 1, or an unknown ``recompute``.
    """

    topology: Topology
    hidden: int
    intermediate: int
    top_k: int
    gated: bool = True
    value_bytes: int = 2
    training: bool = True
    recompute: str = "none"
    other_seconds: float = 0.0
    max_rows_per_rank: int | None = None
    reduce_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "top_k", "value_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_rows_per_rank is not None and self.max_rows_per_rank < 1:
            raise ValueError(f"max_rows_per_rank={self.max_rows_per_rank} must be at least 1")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r} is not one of {', '.join(RECOMPUTE)}")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in compute dtype."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate * self.value_bytes

    @property
    def token_flops(self) -> int:
        """FLOPs of one token through one expert, forward."""
        return (6 if self.gated else 4) * self.hidden * self.intermediate

    @property
    def token_copies(self) -> int:
        """Bytes read and written around one token's products in one expert, forward: rows to the expert's group, the
        gate between the products, the weighted sum after them.
        """
        return (3 * self.hidden + (3 if self.gated else 2) * self.intermediate) * self.value_bytes

    @property
    def exchanges(self) -> int:
        """Token exchanges per micro-batch: dispatch and combine, forward and backward, or recomputed too."""
        return (6 if self.recompute == "layer" else 4) if self.training else 2

    @property
    def computes(self) -> int:
        """Expert passes per micro-batch, a backward counting twice a forward."""
        return (3 - self.is_frozen + (self.recompute != "none")) if self.training else 1

    @property
    def is_frozen(self) -> bool:
        """Whether weights have no gradients."""
        return self.reduce_bytes == 0

    @property
    def weight_trips(self) -> float:
        """Weight transfers per micro-batch: to the slots, again for backward, gradients home in their own dtype."""
        reduced = self.value_bytes if self.reduce_bytes is None else self.reduce_bytes
        return 2 + reduced / self.value_bytes if self.training else 1

    @cached_property
    def figures(self) -> np.ndarray:
        """float64, as :func:`~.seconds.cost_parts` takes them."""
        machine = self.topology
        copies = self.token_copies / machine.copy_bandwidth if machine.copy_bandwidth > 0 else 0.0
        values = {
            "token_seconds": self.token_flops / machine.flops,
            "copy_seconds": copies,
            "row_bytes": self.hidden * self.value_bytes,
            "expert_bytes": self.expert_bytes,
            "intra_bandwidth": machine.intra_bandwidth,
            "inter_bandwidth": machine.inter_bandwidth,
            "latency": machine.latency,
            "intra_latency": machine.intra_latency,
        }
        return np.array([values[name] for name in FIGURES], np.float64)

    def transfer_tokens(self, between_nodes: bool = False) -> int:
        """How many tokens' compute one expert's trip is worth: LLEP's m from figures."""
        machine = self.topology
        link = machine.inter_bandwidth / machine.width if between_nodes else machine.intra_bandwidth
        trip = self.expert_bytes / min(link, machine.intra_bandwidth) * self.weight_trips
        token = self.token_flops / (self.topology.flops * max(self.topology.gemm_efficiency)) * self.computes
        return max(1, int(trip / token))


def predict(
    plan: Plan,
    loads: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    owners: np.ndarray | None = None,
    foreseen: Placement | None = None,
    moved: float = 0.0,
) -> Plan:
    """``plan`` with what it is expected to cost in ``plan.predicted``.

    Args:
        plan: Any plan for ``loads``.
        loads: int64 ``[N, E]``, the loads that the plan serves.
        cost: Layer and machine.
        home: Where weights live: ``whole`` at an owner (helpers fetch them), ``sharded`` over all ranks
            (every slot is unsharded), ``copies`` sharded over the ranks that hold the expert (FSDP + EP),
            ``resident`` in every slot for good (gradients are all-reduced over the copies), ``shadowed`` at
            an owner that broadcasts (each holder passes the weights on once).
        owners: int64 ``[E]``, needed for ``whole`` and ``shadowed``.
        foreseen: The slots that were known before this layer ran, whose weights travel under compute;
            ``None`` means none of the helpers' for ``whole``, all for the others.
        moved: Experts per micro-batch that change their home for good, with optimizer state.

    Raises:
        ValueError: Unknown home, missing owners, or a plan for another number of ranks than the topology's.
    """
    told = _told(plan, loads, cost, home, owners, foreseen)
    rows, foreign, compute, received, given, exchange, trip, known = cost_parts(*told)
    most = float(compute.max()), exchange, trip, known, float((received + given).max())
    times = _times(most, cost, home, foreseen is not None, moved)
    sent, trips = Traffic(rows[0], rows[1], rows[2], rows[3], rows[4], int(foreign)), _trips(cost, home)
    row_bytes = cost.hidden * cost.value_bytes
    prediction = Prediction(
        seconds=times.compute + times.exchange + times.exposed,
        compute_seconds=times.compute,
        exchange_seconds=times.exchange,
        weights_exposed_seconds=times.exposed,
        weights_hidden_seconds=times.hidden,
        bytes_in=(sent.received_near + sent.received_far) * row_bytes * cost.exchanges / 2 + received * trips,
        bytes_out=(sent.sent_near + sent.sent_far) * row_bytes * cost.exchanges / 2 + given * trips,
        peak_bytes=peak_bytes(plan, sent, cost),
        foreign_tokens=int(foreign),
    )
    return replace(plan, predicted=prediction)


def seconds_of(
    plan: Plan,
    loads: np.ndarray,
    cost: CostModel,
    *,
    home: str,
    owners: np.ndarray | None = None,
    foreseen: Placement | None = None,
) -> float:
    """The seconds of :func:`predict` alone, in a fraction of the time: what plans are compared by in a step."""
    most = cost_figures(*_told(plan, loads, cost, home, owners, foreseen))
    times = _times(most, cost, home, foreseen is not None, 0.0)
    return times.compute + times.exchange + times.exposed


class _Times(NamedTuple):
    """A prediction's seconds."""

    compute: float
    exchange: float
    exposed: float
    hidden: float


def _trips(cost: CostModel, home: str) -> float:
    return cost.weight_trips if home != "resident" else int(cost.training)


def _times(
    most: tuple[float, float, float, float, float], cost: CostModel, home: str, foreseen: bool, moved: float
) -> _Times:
    """See :func:`predict`; ``most`` as :func:`cost_figures` gives them."""
    compute, exchange, trip, known, packed = most
    trips, machine = _trips(cost, home), cost.topology
    # What no one foresaw delays the forward; backward knows the plan and has compute to hide weights under.
    owned = home in ("whole", "shadowed")
    sudden = trip if owned else 0.0
    if foreseen:
        sudden = max(0.0, trip - known)
    busy = cost.computes * compute
    weights = trips * trip
    hidden = min(weights - sudden, busy + cost.other_seconds * (3 if cost.training else 1))
    # Master weights and two moments in fp32 beside the weights, over the node's links.
    moving = moved * 7 * cost.expert_bytes / machine.inter_bandwidth
    # What is sent is packed, and what arrives is unpacked, on the busiest rank; no product hides it.
    packing = packed * 2.0 / machine.copy_bandwidth if machine.copy_bandwidth > 0 else 0.0
    exposed = weights - hidden + moving + trips * packing
    if sudden > 0 or (owned and trip > 0):
        exposed += machine.spill_seconds * trips / 3
    return _Times(busy, cost.exchanges * exchange, exposed, hidden)


def _told(
    plan: Plan,
    loads: np.ndarray,
    cost: CostModel,
    home: str,
    owners: np.ndarray | None,
    foreseen: Placement | None,
) -> tuple[Any, ...]:
    """What :func:`cost_parts` takes; for errors see :func:`predict`."""
    split, machine, ranks = plan.split, cost.topology, plan.placement.num_ranks
    if home not in HOMES:
        raise ValueError(f"home={home!r} is not one of {', '.join(HOMES)}")
    if ranks != machine.num_ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the topology has {machine.num_ranks}")
    if owners is None and home in ("whole", "shadowed"):
        raise ValueError(f"home={home!r} needs the owners of the experts")
    return (
        np.ascontiguousarray(loads, np.int64),
        split.first,
        split.rank,
        split.slot,
        split.end,
        np.ascontiguousarray(plan.placement.slots, np.int64),
        _NO_SLOTS if foreseen is None else np.ascontiguousarray(foreseen.slots, np.int64),
        _NO_OWNERS if owners is None else np.ascontiguousarray(owners, np.int64),
        HOMES.index(home),
        machine.width,
        cost.top_k,
        *machine.curve(),
        cost.figures,
    )


def peak_bytes(plan: Plan, rows: Traffic, cost: CostModel) -> np.ndarray:
    """float64 ``[N]``: unsharded weights, their gradients, received rows and the products' activations."""
    held = (plan.placement.slots != EMPTY).sum(axis=1) * float(cost.expert_bytes)
    held *= 2 if cost.training and not cost.is_frozen else 1
    tokens = plan.rank_loads
    if cost.max_rows_per_rank is not None:
        tokens = np.minimum(tokens, cost.max_rows_per_rank)
    per_token = ((3 if cost.gated else 2) * cost.intermediate + cost.hidden) * cost.value_bytes
    return held + 2 * rows.received * cost.hidden * cost.value_bytes + tokens * per_token


def balanced_ideal(loads: np.ndarray, cost: CostModel) -> Prediction:
    """The force-balanced run: the same tokens, every rank and expert loaded alike, weights at rest.

    What expert parallelism would take if the router were perfectly even: the honest 100%.
    """
    ranks, experts = cost.topology.num_ranks, loads.shape[1]
    total = float(loads.sum())
    tokens, efficiency = cost.topology.curve()
    work = 0.0
    if total > 0:
        reached = np.interp(total / max(experts, ranks), tokens, efficiency)
        work = total / ranks / float(reached) * cost.token_flops / cost.topology.flops
        if cost.topology.copy_bandwidth > 0:
            work += total / ranks * (cost.token_copies / cost.topology.copy_bandwidth)
    rows = total / ranks / cost.top_k * (1 - (1 - 1 / ranks) ** cost.top_k)
    width = cost.topology.width
    near = np.full(ranks, rows * (width - 1))
    far = np.full(ranks, rows * (ranks - width))
    row_bytes = cost.hidden * cost.value_bytes
    links = map(float, (cost.topology.intra_bandwidth, cost.topology.inter_bandwidth, cost.topology.latency))
    exchange = exchange_of(np.stack([near, near, far, far]), width, float(row_bytes), *links) * cost.exchanges
    moved = (near + far) * row_bytes * cost.exchanges / 2
    held = experts / ranks * float(cost.expert_bytes) * (2 if cost.training else 1)
    per_token = ((3 if cost.gated else 2) * cost.intermediate + cost.hidden) * cost.value_bytes
    peak = held + 2 * rows * ranks * row_bytes + total / ranks * per_token
    compute = work * cost.computes
    return Prediction(compute + exchange, compute, exchange, 0.0, 0.0, moved, moved.copy(), np.full(ranks, peak), 0)


def lower_bound(loads: np.ndarray, cost: CostModel) -> Prediction:
    """No plan for ``loads`` can beat it: all ranks busy alike at the best efficiency, nothing travels."""
    ranks = cost.topology.num_ranks
    best = cost.topology.flops * max(cost.topology.gemm_efficiency)
    compute = float(loads.sum()) / ranks * cost.token_flops / best * cost.computes
    nothing = np.zeros(ranks)
    return Prediction(compute, compute, 0.0, 0.0, 0.0, nothing, nothing, nothing, 0)
