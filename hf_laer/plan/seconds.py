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
    received, given, border = _weight_trip(slots, owners, home, experts, width)
    most = max(received.max(), given.max()) * expert_bytes
    trip = _link_seconds(most, border.max() * expert_bytes, intra, inter, latency)
    foreseen = 0.0
    if known.shape[0] > 0:
        known_in, known_out, known_border = _weight_trip(known, owners, home, experts, width)
        most = max(known_in.max(), known_out.max()) * expert_bytes
        foreseen = _link_seconds(most, known_border.max() * expert_bytes, intra, inter, latency)
    return rows, foreign, compute, received * expert_bytes, given * expert_bytes, exchange, trip, foreseen


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
