"""What a plan costs: a roofline over products, links and weights, in which the slowest rank counts.

Only sums, products and quotients of float64, in a fixed order: every rank predicts the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .seconds import FIGURES, cost_parts, exchange_of
from .topology import Topology
from .traffic import Traffic
from .types import EMPTY, Placement, Plan, Prediction

HOMES = ("whole", "sharded", "copies", "resident", "shadowed")
RECOMPUTE = ("none", "experts", "layer")


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
    times = _times(plan, loads, cost, home, owners, foreseen, moved)
    sent = Traffic(times.rows[0], times.rows[1], times.rows[2], times.rows[3], times.rows[4], times.foreign)
    row_bytes = cost.hidden * cost.value_bytes
    prediction = Prediction(
        seconds=times.compute + times.exchange + times.exposed,
        compute_seconds=times.compute,
        exchange_seconds=times.exchange,
        weights_exposed_seconds=times.exposed,
        weights_hidden_seconds=times.hidden,
        bytes_in=(sent.received_near + sent.received_far) * row_bytes * cost.exchanges / 2 + times.received,
        bytes_out=(sent.sent_near + sent.sent_far) * row_bytes * cost.exchanges / 2 + times.given,
        peak_bytes=peak_bytes(plan, sent, cost),
        foreign_tokens=times.foreign,
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
    times = _times(plan, loads, cost, home, owners, foreseen, 0.0)
    return times.compute + times.exchange + times.exposed


class _Times(NamedTuple):
    """A prediction's seconds, rows ``[5, N]``, and bytes of weights ``[N]``."""

    compute: float
    exchange: float
    exposed: float
    hidden: float
    rows: np.ndarray
    foreign: int
    received: np.ndarray
    given: np.ndarray


def _times(
    plan: Plan,
    loads: np.ndarray,
    cost: CostModel,
    home: str,
    owners: np.ndarray | None,
    foreseen: Placement | None,
    moved: float,
) -> _Times:
    """See :func:`predict`."""
    ranks = plan.placement.num_ranks
    if home not in HOMES:
        raise ValueError(f"home={home!r} is not one of {', '.join(HOMES)}")
    if ranks != cost.topology.num_ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the topology has {cost.topology.num_ranks}")
    if home in ("whole", "shadowed") and owners is None:
        raise ValueError(f"home={home!r} needs the owners of the experts")
    rows, foreign, compute, received, given, exchange, trip, known = _parts(plan, loads, cost, home, owners, foreseen)
    trips = cost.weight_trips if home != "resident" else int(cost.training)
    # What no one foresaw delays the forward; backward knows the plan and has compute to hide weights under.
    sudden = trip if home in ("whole", "shadowed") else 0.0
    if foreseen is not None:
        sudden = max(0.0, trip - known)
    busy = cost.computes * float(compute.max())
    weights = trips * trip
    hidden = min(weights - sudden, busy + cost.other_seconds * (3 if cost.training else 1))
    # Master weights and two moments in fp32 beside the weights, over the node's links.
    moving = moved * 7 * cost.expert_bytes / cost.topology.inter_bandwidth
    exposed = weights - hidden + moving + trips * _packing_seconds(received, given, cost)
    if sudden > 0:
        exposed += cost.topology.spill_seconds * trips / 3
    exchanges = cost.exchanges * exchange
    return _Times(busy, exchanges, exposed, hidden, rows, int(foreign), received * trips, given * trips)


def _parts(
    plan: Plan,
    loads: np.ndarray,
    cost: CostModel,
    home: str,
    owners: np.ndarray | None,
    foreseen: Placement | None,
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray, np.ndarray, float, float, float]:
    """See :func:`cost_parts`."""
    split, machine = plan.split, cost.topology
    known = np.zeros((0, 0), np.int64) if foreseen is None else foreseen.slots
    tables = (np.zeros(0, np.int64) if owners is None else owners, plan.placement.slots, known)
    owned, slots, ahead = (np.ascontiguousarray(table, np.int64) for table in tables)
    return cost_parts(
        np.ascontiguousarray(loads, np.int64),
        split.first,
        split.rank,
        split.slot,
        split.end,
        slots,
        ahead,
        owned,
        HOMES.index(home),
        machine.width,
        cost.top_k,
        *machine.curve(),
        cost.figures,
    )


def _packing_seconds(received: np.ndarray, given: np.ndarray, cost: CostModel) -> float:
    """Time to pack what is sent and to unpack what arrives, on the busiest rank; no product hides it."""
    if cost.topology.copy_bandwidth == 0:
        return 0.0
    return float((received + given).max()) * 2.0 / cost.topology.copy_bandwidth


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
