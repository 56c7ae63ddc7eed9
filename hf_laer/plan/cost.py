"""What a plan costs: a roofline over products, links and weights, in which the slowest rank counts.

Only sums, products and quotients of float64, in a fixed order: every rank predicts the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ._jit import kernel
from .topology import Topology
from .traffic import Traffic, traffic
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
    def exchanges(self) -> int:
        """Token exchanges per micro-batch: dispatch and combine, forward and backward, or recomputed too."""
        return (6 if self.recompute == "layer" else 4) if self.training else 2

    @property
    def computes(self) -> int:
        """Expert passes per micro-batch, a backward counting twice a forward."""
        return (3 + (self.recompute != "none")) if self.training else 1

    @property
    def weight_trips(self) -> int:
        """Weight transfers per micro-batch: to the slots, again for backward, gradients home."""
        return 3 if self.training else 1

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
    ranks = plan.placement.num_ranks
    if home not in HOMES:
        raise ValueError(f"home={home!r} is not one of {', '.join(HOMES)}")
    if ranks != cost.topology.num_ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the topology has {cost.topology.num_ranks}")
    sent = traffic(loads, plan.split, cost.topology.width, cost.top_k)
    compute = compute_seconds(plan, cost)
    exchange = exchange_seconds(sent, cost)
    trips = cost.weight_trips if home != "resident" else int(cost.training)
    received, given, far = weight_bytes(plan.placement, cost, home, owners)
    trip = _link_seconds(received, given, far, cost)
    # What no one foresaw delays the forward; backward knows the plan and has compute to hide weights under.
    sudden = trip if home in ("whole", "shadowed") else 0.0
    if foreseen is not None:
        sudden = max(0.0, trip - _link_seconds(*weight_bytes(foreseen, cost, home, owners), cost))
    slowest = float(compute.max())
    weights = trips * trip
    hidden = min(weights - sudden, cost.computes * slowest + cost.other_seconds * (3 if cost.training else 1))
    # Master weights and two moments in fp32 beside the weights, over the node's links.
    moving = moved * 7 * cost.expert_bytes / cost.topology.inter_bandwidth
    exposed = weights - hidden + moving
    row_bytes = cost.hidden * cost.value_bytes
    prediction = Prediction(
        seconds=cost.computes * slowest + cost.exchanges * exchange + exposed,
        compute_seconds=cost.computes * slowest,
        exchange_seconds=cost.exchanges * exchange,
        weights_exposed_seconds=exposed,
        weights_hidden_seconds=hidden,
        bytes_in=(sent.received_near + sent.received_far) * row_bytes * cost.exchanges / 2 + received * trips,
        bytes_out=(sent.sent_near + sent.sent_far) * row_bytes * cost.exchanges / 2 + given * trips,
        peak_bytes=peak_bytes(plan, sent, cost),
        foreign_tokens=sent.foreign_nodes,
    )
    return replace(plan, predicted=prediction)


def compute_seconds(plan: Plan, cost: CostModel) -> np.ndarray:
    """float64 ``[N]``: forward time of each rank's products, small groups being slow."""
    slots = plan.placement.slots
    tokens, efficiency = cost.topology.curve()
    work = _effective_tokens(plan.split.rank, plan.split.slot, plan.split.quotas(), slots, tokens, efficiency)
    return work * (cost.token_flops / cost.topology.flops)


@kernel
def _effective_tokens(
    rank: np.ndarray,
    slot: np.ndarray,
    quota: np.ndarray,
    slots: np.ndarray,
    tokens: np.ndarray,
    efficiency: np.ndarray,
) -> np.ndarray:
    """Tokens per rank, each group's divided by the efficiency that its size reaches."""
    groups = np.zeros(slots.shape, np.int64)
    for at in range(len(rank)):
        groups[rank[at], slot[at]] += quota[at]
    work = np.zeros(slots.shape[0], np.float64)
    for holder in range(slots.shape[0]):
        for count in groups[holder]:
            if count > 0:
                work[holder] += count / _efficiency(count, tokens, efficiency)
    return work


@kernel
def _efficiency(count: int, tokens: np.ndarray, efficiency: np.ndarray) -> float:
    if count <= tokens[0]:
        return efficiency[0] * count / tokens[0]
    for at in range(1, len(tokens)):
        if count <= tokens[at]:
            part = (count - tokens[at - 1]) / (tokens[at] - tokens[at - 1])
            return efficiency[at - 1] + part * (efficiency[at] - efficiency[at - 1])
    return efficiency[-1]


def exchange_seconds(rows: Traffic, cost: CostModel) -> float:
    """Time of one exchange: the busiest rank's own links or the busiest node's, sending or receiving."""
    near = max(rows.sent_near.max(), rows.received_near.max())
    far = np.zeros((2, cost.topology.nodes))
    nodes = np.arange(cost.topology.num_ranks) // cost.topology.width
    np.add.at(far[0], nodes, rows.sent_far)
    np.add.at(far[1], nodes, rows.received_far)
    if near == 0 and far.max() == 0:
        return 0.0
    row_bytes = cost.hidden * cost.value_bytes
    inside = near * row_bytes / cost.topology.intra_bandwidth
    between = far.max() * row_bytes / cost.topology.inter_bandwidth
    latency = cost.topology.inter_latency if cost.topology.nodes > 1 else cost.topology.intra_latency
    return float(max(inside, between)) + latency


def weight_bytes(
    placement: Placement, cost: CostModel, home: str, owners: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of one weight trip: float64 ``[N]`` received, ``[N]`` sent, ``[nodes]`` over a node's border."""
    if home in ("whole", "shadowed") and owners is None:
        raise ValueError(f"home={home!r} needs the owners of the experts")
    table = np.zeros(0, np.int64) if owners is None else np.ascontiguousarray(owners, np.int64)
    experts = int(placement.slots.max()) + 1
    in_experts = _weight_trip(placement.slots, table, HOMES.index(home), experts, cost.topology.width)
    return tuple(part * float(cost.expert_bytes) for part in in_experts)  # type: ignore[return-value]


@kernel
def _weight_trip(
    slots: np.ndarray, owners: np.ndarray, home: int, experts: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One trip in experts: received and sent per rank, and the larger direction over each node's border."""
    ranks = slots.shape[0]
    nodes = -(-ranks // width)
    received, sent = np.zeros(ranks), np.zeros(ranks)
    far_in, far_out = np.zeros(nodes), np.zeros(nodes)
    copies = np.zeros(experts, np.int64)
    near = np.zeros((nodes, experts), np.int64)
    for rank in range(ranks):
        for expert in slots[rank]:
            if expert != EMPTY:
                copies[expert] += 1
                near[rank // width, expert] += 1
    filled = copies.sum()
    for rank in range(ranks):
        node = rank // width
        size = min(width, ranks - node * width)
        for expert in slots[rank]:
            if expert == EMPTY:
                continue
            if home == 0:
                if owners[expert] != rank:
                    received[rank] += 1
                    sent[owners[expert]] += 1
                    if owners[expert] // width != node:
                        far_in[node] += 1
                        far_out[owners[expert] // width] += 1
            elif home == 1:
                received[rank] += (ranks - 1) / ranks
                sent[rank] -= 1 / ranks
                far_in[node] += (ranks - size) / ranks
                far_out[node] -= size / ranks
            else:
                holders = copies[expert]
                # A ring over the holders, for a gather as for a broadcast; an all-reduce is two of them.
                trips = 2.0 if home == 3 else 1.0
                received[rank] += trips * (holders - 1) / holders
                sent[rank] += trips * (holders - 1) / holders
                far_in[node] += trips * (holders - near[node, expert]) / holders
                far_out[node] += trips * (holders - near[node, expert]) / holders
    if home == 1:  # each rank sends its slice of every filled slot
        sent += filled / ranks
        for node in range(nodes):
            far_out[node] += filled * min(width, ranks - node * width) / ranks
    return received, sent, np.maximum(far_in, far_out)


def _link_seconds(received: np.ndarray, given: np.ndarray, far: np.ndarray, cost: CostModel) -> float:
    """Time of one weight trip: the busiest rank's links or the busiest node's."""
    most = max(received.max(), given.max())
    if most == 0:
        return 0.0
    latency = cost.topology.inter_latency if cost.topology.nodes > 1 else cost.topology.intra_latency
    inside, between = most / cost.topology.intra_bandwidth, far.max() / cost.topology.inter_bandwidth
    return float(max(inside, between)) + latency


def peak_bytes(plan: Plan, rows: Traffic, cost: CostModel) -> np.ndarray:
    """float64 ``[N]``: unsharded weights, their gradients, received rows and the products' activations."""
    held = (plan.placement.slots != EMPTY).sum(axis=1) * float(cost.expert_bytes) * (2 if cost.training else 1)
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
    rows = total / ranks / cost.top_k * (1 - (1 - 1 / ranks) ** cost.top_k)
    width = cost.topology.width
    near = np.full(ranks, rows * (width - 1))
    far = np.full(ranks, rows * (ranks - width))
    sent = Traffic(near, near, far, far, np.full(ranks, rows), 0)
    exchange = exchange_seconds(sent, cost) * cost.exchanges
    row_bytes = cost.hidden * cost.value_bytes
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
