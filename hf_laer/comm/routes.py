"""Where this rank's tokens go and what it serves for others: one row per (token, destination rank).

A token whose experts sit on one rank travels there once; that rank weighs and sums, and sends one row back.

Letters in shapes: T tokens, K top-k, N ranks of the token group, R rows (one per token and destination),
A assignments (one per token and expert). *out* is what leaves this rank, *in* what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_laer.comm.base import Communicator
from hf_laer.compute.grouped_gemm import Groups
from hf_laer.compute.rows import places
from hf_laer.plan.types import Split


@dataclass(frozen=True, eq=False)
class Routes:
    """The exchange of one micro-batch and layer, the same forward, backward and in a recompute.

    Args:
        row_token: int64 ``[R_out]``, the token of each row that leaves, by destination, then token.
        token_rows: int64 ``[T, ≤K]``, the rows of each token; -1 for none.
        choices: int64 ``[A_out]``, which ``t * K + k`` each assignment is, in the order they travel.
        send_rows: Rows to each rank.
        receive_rows: Rows from each rank.
        send_choices: Assignments to each rank.
        receive_choices: Assignments from each rank.
        source_row: int64 ``[A_in]``, the received row of each assignment, sorted by slot.
        arrival: int64 ``[A_in]``, when each assignment, sorted by slot, arrived.
        row_places: int64 ``[R_in, K]``, the slot-sorted assignments of each received row; -1 for none.
        gates: float32 ``[A_in]``, routing weights sorted by slot.
        groups: Assignments per slot.
    """

    row_token: torch.Tensor
    token_rows: torch.Tensor
    choices: torch.Tensor
    send_rows: list[int]
    receive_rows: list[int]
    send_choices: list[int]
    receive_choices: list[int]
    source_row: torch.Tensor
    arrival: torch.Tensor
    row_places: torch.Tensor
    gates: torch.Tensor
    groups: Groups


def make_routes(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    split: Split,
    before: np.ndarray,
    slot_counts: list[int],
    comm: Communicator,
) -> Routes:
    """Works out the exchange and tells each rank what it will receive.

    Collective over ``comm``.

    Args:
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        split: Which replica serves which part of each expert's stream.
        before: int64 ``[E]``, tokens that earlier ranks of the group have in each expert's stream.
        slot_counts: Tokens that the plan gives to each slot of this rank.
        comm: The token group.
    """
    num_tokens, top_k = top_k_index.shape
    replica = _replicas(top_k_index, split, before)
    destination = _on(split.rank, replica)[replica]
    token = torch.arange(len(replica), device=replica.device) // top_k
    choices = torch.argsort(destination * max(num_tokens, 1) + token, stable=True)
    destination, token = destination[choices], token[choices]
    opens = _opens_row(destination, token)
    row = opens.cumsum(0) - 1
    # Nothing here asks the device how many rows there are: the host waits once, for all sizes together.
    row_token = torch.empty_like(token).scatter_(0, row, token)
    sizes = torch.stack([_count(destination, comm.size, opens), _count(destination, comm.size)], 1)
    first_row = sizes[:, 0].cumsum(0) - sizes[:, 0]
    weights = top_k_weights.detach().reshape(-1)[choices].float().contiguous()
    message = torch.stack(
        [
            (row - first_row[destination]).to(torch.int32),
            _on(split.slot, replica)[replica[choices]].to(torch.int32),
            weights.view(torch.int32),
        ],
        1,
    )
    ones = [1] * comm.size
    arriving = comm.all_to_all(sizes, ones, ones)
    both = torch.stack([sizes.t(), arriving.t()])
    (send_rows, send_choices), (receive_rows, receive_choices) = comm.to_host(both).tolist()
    received = comm.all_to_all(message, send_choices, receive_choices)
    row_token = row_token[: sum(send_rows)]
    arrived = _by_slot(received, arriving, receive_rows, receive_choices, top_k)
    return Routes(
        row_token=row_token,
        token_rows=places(row_token, num_tokens, min(top_k, comm.size)),
        choices=choices,
        send_rows=send_rows,
        receive_rows=receive_rows,
        send_choices=send_choices,
        receive_choices=receive_choices,
        groups=Groups.of(slot_counts, top_k_index.device),
        **arrived,
    )


def _replicas(top_k_index: torch.Tensor, split: Split, before: np.ndarray) -> torch.Tensor:
    """int64 ``[T * K]``: the replica that serves each choice, by its place in the expert's rank-major stream."""
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    ordered = expert[order]
    counts = _count(expert, split.num_experts)
    place = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[ordered]
    place += _on(before, expert)[ordered]
    # One search over all experts: positions of different experts are kept apart by a stride above any position.
    stride = int(split.end.max(initial=0)) + 1
    owner = np.repeat(np.arange(split.num_experts), np.diff(split.first))
    ends = _on(owner * stride + split.end, expert)
    replica = torch.empty_like(expert)
    replica[order] = torch.searchsorted(ends, ordered * stride + place, right=True)
    return replica


def _by_slot(
    received: torch.Tensor, arriving: torch.Tensor, receive_rows: list[int], receive_choices: list[int], top_k: int
) -> dict[str, torch.Tensor]:
    first_row = arriving[:, 0].cumsum(0) - arriving[:, 0]
    offset = first_row.repeat_interleave(arriving[:, 1], output_size=sum(receive_choices))
    row = received[:, 0].long() + offset
    arrival = torch.argsort(received[:, 1], stable=True)
    sorted_place = torch.empty_like(arrival)
    sorted_place[arrival] = torch.arange(len(arrival), device=arrival.device)
    row_places = places(row, sum(receive_rows), top_k)
    if len(row):
        row_places = torch.where(row_places < 0, -1, sorted_place[row_places.clamp(min=0)])
    gates = received[:, 2].contiguous().view(torch.float32)[arrival]
    return {"source_row": row[arrival], "arrival": arrival, "row_places": row_places, "gates": gates}


def _opens_row(destination: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """bool ``[A]``: whether an assignment is the first of its (destination, token)."""
    opens = torch.ones_like(token, dtype=torch.bool)
    opens[1:] = (destination[1:] != destination[:-1]) | (token[1:] != token[:-1])
    return opens


def _count(values: torch.Tensor, bins: int, which: torch.Tensor | None = None) -> torch.Tensor:
    """int64 ``[bins]``, of those values that ``which`` (bool) marks.

    A scatter, since ``bincount`` waits for the device and is refused in deterministic mode.
    """
    ones = torch.ones_like(values) if which is None else which.to(values.dtype)
    return torch.zeros(bins, dtype=torch.int64, device=values.device).scatter_add_(0, values, ones)


def _on(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(like.device, non_blocking=True)
