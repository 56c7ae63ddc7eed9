"""Dispatch and combine: token rows travel to the ranks of their experts, one row per destination, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_laer.comm.base import Communicator, Pending, Sums
from hf_laer.comm.routes import Routes


def start_forward(tokens: torch.Tensor, dtype: torch.dtype, routes: Routes, comm: Communicator) -> Pending:
    """As :func:`start_dispatch` in ``dtype``, where the tokens have not set out already."""
    set_out, routes.set_out = routes.set_out, None
    return start_dispatch(tokens.to(dtype), routes, comm) if set_out is None else set_out


def start_dispatch(tokens: torch.Tensor, routes: Routes, comm: Communicator) -> Pending:
    """``[T, H]`` set out for the ranks that serve them; ``[R_in, H]`` will arrive. Collective over ``comm``."""
    return comm.start_all_to_all(tokens, routes.send_rows, routes.receive_rows, routes.picked)


@dataclass(frozen=True)
class Combining:
    """Rows on their way back to their tokens."""

    pending: Pending
    routes: Routes

    def finish(self, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """``[T, H]`` in ``dtype``: summed in float32 and scaled."""
        return self.pending.summed(self.routes.token_rows, dtype, scale)


def start_combine(rows: torch.Tensor, routes: Routes, comm: Communicator) -> Combining:
    """The adjoint of :func:`start_dispatch`: ``[R_in, H]`` set out for their tokens. Collective over ``comm``."""
    return Combining(comm.start_all_to_all(rows, routes.receive_rows, routes.send_rows), routes)


def start_combine_sums(sums: Sums, routes: Routes, comm: Communicator) -> Combining:
    """As :func:`start_combine`, of rows that are still to be formed."""
    return Combining(comm.start_sums(sums, routes.receive_rows, routes.send_rows), routes)


def return_gates(grad: torch.Tensor, routes: Routes, comm: Communicator) -> torch.Tensor:
    """Routing-weight gradients to where they came from: float32 ``[A_in]`` by slot to ``[T * K]``. Collective."""
    arrived = torch.empty_like(grad)
    arrived[routes.served.arrival] = grad
    home = comm.all_to_all(arrived, routes.receive_choices, routes.send_choices)
    out = torch.empty_like(home)
    out[routes.choices] = home
    return out
