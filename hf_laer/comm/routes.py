"""Where this rank's tokens go and what it serves for others: one row per (token, destination rank).

A token whose experts sit on one rank travels there once; that rank weighs and sums, and sends one row back.

Letters in shapes: T tokens, K top-k, N ranks of the token group, R rows (one per token and destination),
A assignments (one per token and expert). *out* is what leaves this rank, *in* what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.comm.base import Communicator
from hf_laer.compute.grouped_gemm import Groups
from hf_laer.compute.routing import Leaving, Shares, arrive, leave
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


class Departure(NamedTuple):
    """An exchange whose sizes are under way.

    Args:
        leaving: What leaves this rank.
        arriving: int64 ``[N, 2]``, rows and assignments from each rank.
        top_k: K.
    """

    leaving: Leaving
    arriving: torch.Tensor
    top_k: int


def depart(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, split: Split, before: np.ndarray, comm: Communicator
) -> Departure:
    """Works out what leaves this rank and tells the others how much it is. Collective over ``comm``.

    Args:
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        split: Which replica serves which part of each expert's stream.
        before: int64 ``[E]``, tokens that earlier ranks of the group have in each expert's stream.
        comm: The token group.
    """
    leaving = leave(top_k_index, top_k_weights, Shares.of(split, before, comm.size, top_k_index.device))
    ones = [1] * comm.size
    return Departure(leaving, comm.all_to_all(leaving.sizes, ones, ones), top_k_index.shape[1])


def make_routes(departure: Departure, slot_counts: list[int], comm: Communicator) -> Routes:
    """The exchange, once this rank knows what it will receive. Collective over ``comm``; waits for the device.

    Args:
        departure: From :func:`depart`.
        slot_counts: Tokens that the plan gives to each slot of this rank.
        comm: The token group.
    """
    leaving, arriving = departure.leaving, departure.arriving
    # The host waits once, for all sizes together.
    both = torch.stack([leaving.sizes.t(), arriving.t()])
    (send_rows, send_choices), (receive_rows, receive_choices) = comm.to_host(both).tolist()
    received = comm.all_to_all(leaving.message, send_choices, receive_choices)
    arrived = arrive(received, arriving, sum(receive_rows), departure.top_k, len(slot_counts))
    return Routes(
        row_token=leaving.row_token[: sum(send_rows)],
        token_rows=leaving.token_rows,
        choices=leaving.choices,
        send_rows=send_rows,
        receive_rows=receive_rows,
        send_choices=send_choices,
        receive_choices=receive_choices,
        source_row=arrived.source_row,
        arrival=arrived.arrival,
        row_places=arrived.row_places,
        gates=arrived.gates,
        groups=Groups.of(slot_counts, received.device, arrived.slot),
    )
