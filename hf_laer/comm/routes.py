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


class Sending(NamedTuple):
    """What one rank sends in a micro-batch, and by which plan.

    Args:
        hidden: ``[T, H]``, its tokens.
        dtype: In which they travel.
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        counted: The choices, counted.
        split: Which replica serves which part of each expert's stream.
        loads: int64 ``[N, E]``, of all ranks of the token group.
        own: This rank's part of the plan.
        arrangement: How the rows of this rank's slots are to lie.
    """

    hidden: torch.Tensor
    dtype: torch.dtype
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    counted: Counted
    split: Split
    loads: np.ndarray
    own: OwnPart
    arrangement: Arrangement

    @property
    def top_k(self) -> int:
        """K."""
        return self.top_k_index.shape[1]

    @property
    def tokens(self) -> np.ndarray:
        """int64 ``[N]``: tokens of each rank."""
        return self.loads.sum(1) // self.top_k

    def before(self, rank: int) -> np.ndarray:
        """int64 ``[E]``: tokens that earlier ranks have in each expert's stream."""
        return self.loads[:rank].sum(0)


class Known(NamedTuple):
    """What was found out before the plan was known.

    Args:
        leaving: What leaves this rank.
        send_rows: int64 ``[N]``, rows to each rank.
        receive_rows: int64 ``[N]``, rows from each rank.
        gone: Messages and rows, if they have set out.
    """

    leaving: Leaving
    send_rows: np.ndarray
    receive_rows: np.ndarray
    gone: Gone | None


class _Departure(NamedTuple):
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


def exchange(sending: Sending, comm: Communicator, known: Known | None = None) -> Routes:
    """Works out what leaves this rank, tells the others and learns what arrives. Collective over ``comm``.

    Args:
        sending: What leaves, and by which plan.
        comm: The token group.
        known: What is known of it.
    """
    most = int(sending.tokens.max(initial=0))
    comm.reserve(most, sending.top_k, sending.hidden.shape[1] * sending.dtype.itemsize)
    if known is not None:
        return _expected(sending, comm, known, most)
    return _at_once(sending, comm) if comm.can_start else _agreed(sending, comm)


def _expected(sending: Sending, comm: Communicator, known: Known, most: int) -> Routes:
    """Where it is known how many rows travel, so that the host need not wait."""
    gone = known.gone if known.gone is not None and known.gone.holds(most) else None
    rows = OwnRows.of(sending.own, sending.arrangement, sending.top_k_index.device)
    return _unawaited(_departed(sending, known.leaving, rows, comm, gone), known.send_rows, known.receive_rows, gone)


def _at_once(sending: Sending, comm: Communicator) -> Routes:
    """Where messages and rows set out together, and the host never learns how many rows there are.

    There is room for as many as there may be, one for each token and for each choice; the last ones may mean nothing.
    """
    send_rows = np.minimum(sending.own.sent, sending.top_k_index.shape[0])
    receive_rows = most_rows(sending.tokens, sending.own)
    starts = np.stack([send_rows.cumsum() - send_rows, receive_rows.cumsum() - receive_rows])
    told = sending.split, sending.before(comm.rank), sending.own, sending.arrangement
    shares, rows = shares_and_rows(*told, sending.top_k_index.device, starts)
    assert rows.starts is not None
    leaving = leave(sending.top_k_index, sending.top_k_weights, shares, sending.counted, rows.starts[0])
    gone = comm.start(sending.hidden.to(sending.dtype), leaving, sending.top_k)
    assert gone is not None, "room was reserved"
    routes = _unawaited(_departed(sending, leaving, rows, comm, gone), send_rows, receive_rows, gone)
    routes.picked = Picked(leaving.row_token, leaving.ends)
    return routes


def _agreed(sending: Sending, comm: Communicator) -> Routes:
    """Where each rank must be told how many rows will arrive, for which the host waits."""
    told = sending.split, sending.before(comm.rank), sending.own, sending.arrangement
    shares, rows = shares_and_rows(*told, sending.top_k_index.device)
    leaving = leave(sending.top_k_index, sending.top_k_weights, shares, sending.counted)
    departure = _departed(sending, leaving, rows, comm, None)
    received = departure.pending.wait()
    both_ways = rows_both_ways(leaving.message, received, rows.edges)
    served = _serve(departure, received, int(most_rows(sending.tokens, sending.own).sum()))
    # The host waits once, for how many rows there are; assignments are known from the plan.
    send_rows, receive_rows = comm.to_host(both_ways).tolist()
    served = served._replace(row_places=served.row_places[: sum(receive_rows)])
    return _routes(departure, send_rows, receive_rows, lambda: served)


def _departed(sending: Sending, leaving: Leaving, rows: OwnRows, comm: Communicator, gone: Gone | None) -> _Departure:
    send, receive = sending.own.sent.tolist(), sending.own.received.tolist()
    pending = comm.start_all_to_all(leaving.message, send, receive) if gone is None else gone.messages(receive)
    return _Departure(leaving, rows, sending.arrangement, pending, send, receive, sending.top_k)


def _unawaited(departure: _Departure, send: np.ndarray, receive: np.ndarray, gone: Gone | None) -> Routes:
    send_rows, receive_rows = send.tolist(), receive.tolist()

    def arriving() -> Served:
        return _serve(departure, departure.pending.wait(), sum(receive_rows))

    routes = _routes(departure, send_rows, receive_rows, arriving)
    routes.set_out = None if gone is None else gone.rows(receive_rows)
    return routes


def _routes(
    departure: _Departure, send_rows: list[int], receive_rows: list[int], arriving: Callable[[], Served]
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


def _serve(departure: _Departure, received: torch.Tensor, rows: int) -> Served:
    """The tables of what arrived, of at least R rows."""
    places, ends = departure.own.slots
    starts = None if departure.own.starts is None else departure.own.starts[1]
    arrived = arrive(received, departure.own.edges[1], rows, departure.top_k, places, starts)
    groups = Groups(departure.arrangement, ends, arrived.slot)
    return Served(arrived.source_row, arrived.arrival, arrived.row_places, arrived.gates, groups)


def most_rows(tokens: np.ndarray, own: OwnPart) -> np.ndarray:
    """int64 ``[N]``: at most this many rows arrive from each rank, one per choice and one per token.

    Args:
        tokens: int64 ``[N]``, tokens of each rank.
        own: This rank's part of the plan.
    """
    return np.minimum(own.received, tokens)
