"""The cost model's arithmetic, in one compiled call: the engine asks it in the middle of a step."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .traffic import rows_of
from .types import EMPTY

# What `cost_parts` takes in its array of figures.
FIGURES = (
    "token_seconds",
    "copy_seconds",
    "row_bytes",
    "expert_bytes",
    "intra_bandwidth",
    "inter_bandwidth",
    "latency",
    "intra_latency",
)


@kernel
def cost_parts(
    loads: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    end: np.ndarray,
    slots: np.ndarray,
    known: np.ndarray,
    owners: np.ndarray,
    home: int,
    width: int,
    top_k: int,
    tokens: np.ndarray,
    efficiency: np.ndarray,
    figures: np.ndarray,
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray, np.ndarray, float, float, float]:
    """What a plan asks of compute and links.

    Args:
        loads: int64 ``[N, E]``.
        first: The split's, with ``rank``, ``slot`` and ``end``.
        rank: See above.
        slot: See above.
        end: See above.
        slots: int64 ``[N, S]``.
        known: int64 ``[N, S']``, slots that were foreseen, or ``[0, 0]``.
        owners: int64 ``[E]``, or ``[0]`` where weights have none.
        home: Which of the homes.
        width: Ranks per node.
        top_k: K.
        tokens: The curve's group sizes.
        efficiency: The curve.
        figures: float64, by ``FIGURES``.

    Returns:
        Rows ``[5, N]`` (see :class:`~.traffic.Traffic`); assignments that leave their node; per rank seconds of
        forward compute ``[N]``, bytes of a weight trip received ``[N]`` and given ``[N]``; seconds of an exchange of
        tokens, of a weight trip, and of the known slots' weight trip.
    """
    token_seconds, copy_seconds, row_bytes, expert_bytes = figures[0], figures[1], figures[2], figures[3]
    intra, inter, latency = figures[4], figures[5], figures[6]
    rows, foreign = rows_of(loads, first, rank, end, width, top_k)
    compute = _compute(first, rank, slot, end, slots, tokens, efficiency, token_seconds, copy_seconds)
    far = _far_rows(rows, width)
    exchange = _link_seconds(max(rows[0].max(), rows[1].max()) * row_bytes, far * row_bytes, intra, inter, latency)
    experts = loads.shape[1]
    received, given, border, passed = _weight_trip(slots, owners, home, experts, width)
    trip = _trip_seconds(received, given, border, passed, expert_bytes, figures)
    foreseen = 0.0
    if known.shape[0] > 0:
        known_in, known_out, known_border, known_passed = _weight_trip(known, owners, home, experts, width)
        foreseen = _trip_seconds(known_in, known_out, known_border, known_passed, expert_bytes, figures)
    return rows, foreign, compute, received * expert_bytes, given * expert_bytes, exchange, trip, foreseen


@kernel
def cost_figures(
    loads: np.ndarray,
    first: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    end: np.ndarray,
    slots: np.ndarray,
    known: np.ndarray,
    owners: np.ndarray,
    home: int,
    width: int,
    top_k: int,
    tokens: np.ndarray,
    efficiency: np.ndarray,
    figures: np.ndarray,
) -> tuple[float, float, float, float, float]:
    """Of :func:`cost_parts` what seconds follow from, as numbers, which are made sooner than arrays: the longest
    forward compute; an exchange of tokens; a weight trip; that of the known slots; the most bytes that a rank gets and
    gives in one.
    """
    parts = cost_parts(
        loads, first, rank, slot, end, slots, known, owners, home, width, top_k, tokens, efficiency, figures
    )
    return parts[2].max(), parts[5], parts[6], parts[7], (parts[3] + parts[4]).max()


@kernel
def _trip_seconds(
    received: np.ndarray,
    given: np.ndarray,
    border: np.ndarray,
    passed: np.ndarray,
    expert_bytes: float,
    figures: np.ndarray,
) -> float:
    """Seconds of a weight trip: what comes straight, then what is passed on inside nodes."""
    intra, inter, latency, intra_latency = figures[4], figures[5], figures[6], figures[7]
    straight = max((received - passed[0]).max(), (given - passed[1]).max())
    seconds = _link_seconds(straight * expert_bytes, border.max() * expert_bytes, intra, inter, latency)
    return seconds + _link_seconds(passed.max() * expert_bytes, 0.0, intra, inter, intra_latency)


@kernel
def _link_seconds(near: float, far: float, intra: float, inter: float, latency: float) -> float:
    """The busiest rank's own links or the busiest node's; nothing where nothing travels."""
    if near == 0 and far == 0:
        return 0.0
    return max(near / intra, far / inter) + latency


@kernel
def exchange_of(rows: np.ndarray, width: int, row_bytes: float, intra: float, inter: float, latency: float) -> float:
    """Seconds of one exchange of ``rows [4, N]``: sent near, received near, sent far, received far."""
    near = max(rows[0].max(), rows[1].max()) * row_bytes
    return _link_seconds(near, _far_rows(rows, width) * row_bytes, intra, inter, latency)


@kernel
def _far_rows(rows: np.ndarray, width: int) -> float:
    """Rows over the busiest node's border, in the busier direction."""
    most = 0.0
    for start in range(0, rows.shape[1], width):
        most = max(most, rows[2, start : start + width].sum(), rows[3, start : start + width].sum())
    return most


@kernel
def _compute(
    first: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    end: np.ndarray,
    slots: np.ndarray,
    tokens: np.ndarray,
    efficiency: np.ndarray,
    token_seconds: float,
    copy_seconds: float,
) -> np.ndarray:
    """Seconds per rank: each group's tokens divided by the efficiency that its size reaches, and copies."""
    groups = np.zeros(slots.shape, np.int64)
    for expert in range(len(first) - 1):
        begin = 0
        for at in range(first[expert], first[expert + 1]):
            groups[rank[at], slot[at]] += end[at] - begin
            begin = end[at]
    seconds = np.zeros(slots.shape[0], np.float64)
    for holder in range(slots.shape[0]):
        work, held = 0.0, 0
        for count in groups[holder]:
            if count > 0:
                work += count / _efficiency(count, tokens, efficiency)
                held += count
        seconds[holder] = work * token_seconds + held * copy_seconds
    return seconds


@kernel
def _efficiency(count: int, tokens: np.ndarray, efficiency: np.ndarray) -> float:
    if count <= tokens[0]:
        return efficiency[0] * count / tokens[0]
    for at in range(1, len(tokens)):
        if count <= tokens[at]:
            part = (count - tokens[at - 1]) / (tokens[at] - tokens[at - 1])
            return efficiency[at - 1] + part * (efficiency[at] - efficiency[at - 1])
    return efficiency[-1]


@kernel
def _weight_trip(
    slots: np.ndarray, owners: np.ndarray, home: int, experts: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One trip in experts: received and sent per rank, the larger direction over each node's border, and of what is
    received and sent what ranks of one node pass on to each other ``[2, N]``.
    """
    ranks = slots.shape[0]
    nodes = -(-ranks // width)
    received, sent, passed = np.zeros(ranks), np.zeros(ranks), np.zeros((2, ranks))
    far_in, far_out = np.zeros(nodes), np.zeros(nodes)
    near = np.zeros((nodes, experts), np.int64)
    for rank in range(ranks):
        for expert in slots[rank]:
            if expert != EMPTY:
                near[rank // width, expert] += 1
    if home == 0:
        _from_owners(slots, owners, near, width, received, sent, far_in, far_out, passed)
    elif home == 1:
        _from_slices(slots, near, width, received, sent, far_in, far_out, passed)
    else:
        # A ring over the holders, for a gather as for a broadcast; an all-reduce is two of them.
        _around_rings(slots, near, width, 2.0 if home == 3 else 1.0, received, sent, far_in, far_out)
    return received, sent, np.maximum(far_in, far_out), passed


@kernel
def _from_owners(
    slots: np.ndarray,
    owners: np.ndarray,
    near: np.ndarray,
    width: int,
    received: np.ndarray,
    sent: np.ndarray,
    far_in: np.ndarray,
    far_out: np.ndarray,
    passed: np.ndarray,
) -> None:
    """Whole experts: to each rank of the owner's node, and once to each other node that needs them."""
    turns = np.zeros(near.shape, np.int64)
    for rank in range(slots.shape[0]):
        node = rank // width
        for expert in slots[rank]:
            if expert == EMPTY or owners[expert] == rank:
                continue
            received[rank] += 1
            owner = owners[expert]
            if owner // width == node:
                sent[owner] += 1
                continue
            many, turn = near[node, expert], turns[node, expert]
            turns[node, expert] += 1
            if turn == (owner + expert) % many:
                sent[owner] += 1
                far_in[node] += 1
                far_out[owner // width] += 1
                sent[rank] += many - 1
                passed[1, rank] += many - 1
            else:
                passed[0, rank] += 1


@kernel
def _from_slices(
    slots: np.ndarray,
    near: np.ndarray,
    width: int,
    received: np.ndarray,
    sent: np.ndarray,
    far_in: np.ndarray,
    far_out: np.ndarray,
    passed: np.ndarray,
) -> None:
    """Slices of every expert: to each rank of the own node, and once to each other node; its ranks take turns."""
    ranks, nodes = slots.shape[0], near.shape[0]
    there, filled = np.zeros(nodes), np.zeros(nodes)
    for node in range(nodes):
        for expert in range(near.shape[1]):
            there[node] += near[node, expert] > 0
            filled[node] += near[node, expert]
    for rank in range(ranks):
        node = rank // width
        away = ranks - min(width, ranks - node * width)
        held = 0
        for expert in slots[rank]:
            if expert != EMPTY:
                held += 1
                many = near[node, expert]
                passed[0, rank] += away / ranks * (many - 1) / many
        passed[1, rank] = passed[0, rank]
        received[rank] = held * (ranks - 1) / ranks
        sent[rank] = (filled[node] - held + there.sum() - there[node]) / ranks + passed[1, rank]
    for node in range(nodes):
        size = min(width, ranks - node * width)
        far_in[node] = there[node] * (ranks - size) / ranks
        far_out[node] = (there.sum() - there[node]) * size / ranks


@kernel
def _around_rings(
    slots: np.ndarray,
    near: np.ndarray,
    width: int,
    trips: float,
    received: np.ndarray,
    sent: np.ndarray,
    far_in: np.ndarray,
    far_out: np.ndarray,
) -> None:
    """All holders of an expert in a ring."""
    copies = near.sum(axis=0)
    for rank in range(slots.shape[0]):
        node = rank // width
        for expert in slots[rank]:
            if expert != EMPTY:
                holders = copies[expert]
                received[rank] += trips * (holders - 1) / holders
                sent[rank] += trips * (holders - 1) / holders
                far_in[node] += trips * (holders - near[node, expert]) / holders
                far_out[node] += trips * (holders - near[node, expert]) / holders
