"""Where this rank's tokens go and what it serves for others: one row per (token, destination rank).

A token whose experts sit on one rank travels there once; that rank weighs and sums, and sends one row back.

Letters in shapes: T tokens, K top-k, N ranks of the token group, R rows (one per token and destination),
A assignments (one per token and expert). *out* is what leaves this rank, *in* what it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.comm.base import Communicator, Gone, Pending, Picked
from hf_laer.compute.grouped_gemm import Arrangement, Groups
from hf_laer.compute.routing import Counted, Leaving, OwnRows, arrive, leave, rows_both_ways, shares_and_rows
from hf_laer.plan.own import OwnPart
from hf_laer.plan.types import Split


class Served(NamedTuple):
    """What arrived for this rank's slots.

    Args:
        source_row: int64 ``[A_in]``, the received row of each assignment, sorted by slot.
        arrival: int64 ``[A_in]``, when each assignment, sorted by slot, arrived.
        row_places: int64 ``[R_in, K]``, the slot-sorted assignments of each received row; -1 for none.
        gates: float32 ``[A_in]``, routing weights sorted by slot.
        groups: Assignments per slot.
    """

    source_row: torch.Tensor
    arrival: torch.Tensor
    row_places: torch.Tensor
    gates: torch.Tensor
    groups: Groups


@dataclass(eq=False)
class Routes:
    """The exchange of one micro-batch and layer, the same forward, backward and in a recompute.

    Args:
        picked: The token of each row that leaves, by destination, then token.
        token_rows: int64 ``[T, ≤K]``, the rows of each token; -1 for none.
        choices: int64 ``[A_out]``, which ``t * K + k`` each assignment is, in the order they travel.
        send_rows: Rows to each rank, or as many as there may be.
        receive_rows: Rows from each rank, likewise.
        send_choices: Assignments to each rank.
        receive_choices: Assignments from each rank.
        arriving: Makes the tables of what arrives, once.
        set_out: The tokens, where they set out before the plan was known.
    """

    picked: Picked
    token_rows: torch.Tensor
    choices: torch.Tensor
    send_rows: list[int]
    receive_rows: list[int]
    send_choices: list[int]
    receive_choices: list[int]
    arriving: Callable[[], Served] | None
    set_out: Pending | None = None
    _served: Served | None = None

    @property
    def served(self) -> Served:
        """What arrived; its tables are made when they are asked for first, so that the tokens can set out before."""
        if self.arriving is not None:
            self._served, self.arriving = self.arriving(), None
        assert self._served is not None
        return self._served


class Departure(NamedTuple):
    """An exchange whose messages are under way.

    Args:
        leaving: What leaves this rank.
        own: What this rank sends, gets and serves, on the device.
        arrangement: How the rows of this rank's slots will lie.
        pending: The messages of all ranks.
        send_choices: Assignments to each rank.
        receive_choices: Assignments from each rank.
        top_k: K.
    """

    leaving: Leaving
    own: OwnRows
    arrangement: Arrangement
    pending: Pending
    send_choices: list[int]
    receive_choices: list[int]
    top_k: int


def depart(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    counted: Counted,
    split: Split,
    before: np.ndarray,
    own: OwnPart,
    arrangement: Arrangement,
    comm: Communicator,
    leaving: Leaving | None = None,
    gone: Gone | None = None,
) -> Departure:
    """Works out what leaves this rank and tells the others. Collective over ``comm``.

    Args:
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        counted: The choices, counted.
        split: Which replica serves which part of each expert's stream.
        before: int64 ``[E]``, tokens that earlier ranks of the group have in each expert's stream.
        own: This rank's part of the plan.
        arrangement: How the rows of this rank's slots are to lie.
        comm: The token group.
        leaving: What leaves this rank, if that is known.
        gone: The messages, if they have set out.
    """
    device = top_k_index.device
    if leaving is None:
        shares, rows = shares_and_rows(split, before, own, arrangement, device)
        leaving = leave(top_k_index, top_k_weights, shares, counted)
    else:
        rows = OwnRows.of(own, arrangement, device)
    send, receive = own.sent.tolist(), own.received.tolist()
    pending = comm.start_all_to_all(leaving.message, send, receive) if gone is None else gone.messages(receive)
    return Departure(leaving, rows, arrangement, pending, send, receive, top_k_index.shape[1])


def make_routes(departure: Departure, most_rows: int, comm: Communicator) -> Routes:
    """The exchange, once this rank knows what it will receive; waits for the device.

    Args:
        departure: From :func:`depart`.
        most_rows: No more rows than this arrive.
        comm: The token group.
    """
    edges, received = departure.own.edges, departure.pending.wait()
    rows = rows_both_ways(departure.leaving.message, received, edges)
    served = _serve(departure, received, most_rows)
    # The host waits once, for how many rows there are; assignments are known from the plan.
    send_rows, receive_rows = comm.to_host(rows).tolist()
    served = served._replace(row_places=served.row_places[: sum(receive_rows)])
    return _routes(departure, send_rows, receive_rows, lambda: served)


def known_routes(
    departure: Departure, send: np.ndarray, receive: np.ndarray, gone: Gone | None = None
) -> Routes:
    """The exchange where the host has no need to wait.

    Args:
        departure: From :func:`depart`.
        send: int64 ``[N]``, rows to each rank.
        receive: int64 ``[N]``, rows from each rank.
        gone: The tokens, if they have set out.
    """
    send_rows, receive_rows = send.tolist(), receive.tolist()

    def arriving() -> Served:
        return _serve(departure, departure.pending.wait(), sum(receive_rows))

    routes = _routes(departure, send_rows, receive_rows, arriving)
    routes.set_out = None if gone is None else gone.rows(receive_rows)
    return routes


def go(
    tokens: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    counted: Counted,
    split: Split,
    group: np.ndarray,
    own: OwnPart,
    arrangement: Arrangement,
    comm: Communicator,
) -> Routes | None:
    """The exchange where messages and rows set out together and the host never learns how many rows there are.

    It knows how many there are at most, one for each token and for each choice: so many it makes room for, the last of
    each rank's may mean nothing. Collective over ``comm``; ``None`` where tokens cannot travel so, on all ranks.

    Args:
        tokens: ``[T, H]``.
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        counted: The choices, counted.
        split: Which replica serves which part of each expert's stream.
        group: int64 ``[N, E]``, the loads of the ranks of ``comm``.
        own: This rank's part of the plan.
        arrangement: How the rows of this rank's slots are to lie.
        comm: The token group.
    """
    if not comm.can_start:
        return None
    send_rows = np.minimum(own.sent, len(top_k_index))
    receive_rows = np.minimum(own.received, group.sum(1) // top_k_index.shape[1])
    starts = np.stack([send_rows.cumsum() - send_rows, receive_rows.cumsum() - receive_rows])
    before, device = group[: comm.rank].sum(0), top_k_index.device
    shares, rows = shares_and_rows(split, before, own, arrangement, device, starts)
    assert rows.starts is not None
    leaving = leave(top_k_index, top_k_weights, shares, counted, rows.starts[0])
    gone = comm.start(tokens, leaving, top_k_index.shape[1])
    assert gone is not None
    send, receive = own.sent.tolist(), own.received.tolist()
    departure = Departure(leaving, rows, arrangement, gone.messages(receive), send, receive, top_k_index.shape[1])
    routes = known_routes(departure, send_rows, receive_rows, gone)
    routes.picked = Picked(leaving.row_token, leaving.ends)
    return routes


def _routes(
    departure: Departure, send_rows: list[int], receive_rows: list[int], arriving: Callable[[], Served]
) -> Routes:
    leaving = departure.leaving
    return Routes(
        picked=Picked(leaving.row_token[: sum(send_rows)]),
        token_rows=leaving.token_rows,
        choices=leaving.choices,
        send_rows=send_rows,
        receive_rows=receive_rows,
        send_choices=departure.send_choices,
        receive_choices=departure.receive_choices,
        arriving=arriving,
    )


def _serve(departure: Departure, received: torch.Tensor, rows: int) -> Served:
    """The tables of what arrived, of at least R rows."""
    places, ends = departure.own.slots
    starts = None if departure.own.starts is None else departure.own.starts[1]
    arrived = arrive(received, departure.own.edges[1], rows, departure.top_k, places, starts)
    groups = Groups(departure.arrangement, ends, arrived.slot)
    return Served(arrived.source_row, arrived.arrival, arrived.row_places, arrived.gates, groups)


def most_rows(loads: np.ndarray, own: OwnPart, top_k: int) -> int:
    """At most this many rows arrive: one per choice, and from each rank one per token.

    Args:
        loads: int64 ``[N, E]``, choices of each rank.
        own: This rank's part of the plan.
        top_k: Choices of each token.
    """
    return int(np.minimum(own.received, loads.sum(1) // top_k).sum())
