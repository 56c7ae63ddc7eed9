"""From the router's choices to rows that travel, and from what arrives to rows sorted by slot.

Plain PyTorch, and the reference of :mod:`hf_laer.compute.kernels.routing`, which does the same in a few launches.
Nothing here waits for the device.

Letters in shapes: T tokens, K top-k, E experts, N ranks, P replicas of all experts, R rows (one per token and
destination), A assignments (one per token and expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.compute.grouped_gemm import Arrangement
from hf_laer.compute.kernels import usable
from hf_laer.compute.rows import places
from hf_laer.plan.own import OwnPart
from hf_laer.plan.types import Split

# An int32 that no stream of tokens reaches.
_NO_END = 1 << 30


@dataclass(frozen=True, eq=False)
class Shares:
    """Which replica serves which part of each expert's stream, on the device in one tensor.

    Args:
        packed: int32 ``[E + 1 + E + 3P]``: the first replica of each expert, then the tokens that earlier ranks have in
            its stream, then each replica's rank, slot, and the end of its part.
        experts: E.
        replicas: P.
        most: The most replicas that an expert has.
        ranks: N.
    """

    packed: torch.Tensor
    experts: int
    replicas: int
    most: int
    ranks: int

    @classmethod
    def of_owners(cls, owners: np.ndarray, ranks: int, device: torch.device) -> Shares:
        """On ``device``, where every expert stays with its owner, whatever the loads; ``owners`` int64 ``[E]``."""
        experts = len(owners)
        first_of = np.searchsorted(owners, owners)
        slot, end = np.arange(experts) - first_of, np.full(experts, _NO_END)
        parts = (np.arange(experts + 1), np.zeros(experts, np.int64), owners, slot, end)
        return cls(_packed(parts, device), experts, experts, 1, ranks)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """First replicas, tokens before, ranks, slots, ends; int64."""
        return self.packed.long().split((self.experts + 1, self.experts, *[self.replicas] * 3))


@dataclass(frozen=True, eq=False)
class OwnRows:
    """What this rank sends, gets and serves, on the device in one tensor.

    Args:
        packed: int32 ``[2N + 2S]``: where the choices to each rank end, and where those from each rank do; then the
            place of each of this rank's slots in the order of its rows, and where its rows end
            (:class:`~hf_laer.compute.grouped_gemm.Arrangement`).
        ranks: N.
        starts: int32 ``[2, N]``, where the rows of each rank begin among those that come back from it, and among those
            that come from it, where there is room for more than there are.
    """

    packed: torch.Tensor
    ranks: int
    starts: torch.Tensor | None = None

    @classmethod
    def of(cls, own: OwnPart, arrangement: Arrangement, device: torch.device) -> OwnRows:
        """On ``device``."""
        return cls(_packed(_own_rows(own, arrangement), device), len(own.sent))

    @property
    def edges(self) -> torch.Tensor:
        """int32 ``[2, N]``: where the choices to each rank end, and those from each rank."""
        return self.packed[: 2 * self.ranks].view(2, self.ranks)

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[2, S]``: each slot's place in the order of rows, and where its rows end."""
        return self.packed[2 * self.ranks :].view(2, -1)


def shares_and_rows(
    split: Split,
    before: np.ndarray,
    own: OwnPart,
    arrangement: Arrangement,
    device: torch.device,
    starts: np.ndarray | None = None,
) -> tuple[Shares, OwnRows]:
    """What a plan says of this rank's tokens, in one copy to ``device``.

    Args:
        split: Which replica serves which part of each expert's stream.
        before: int64 ``[E]``, tokens that earlier ranks have in each expert's stream.
        own: This rank's part of the plan.
        arrangement: How the rows of this rank's slots lie.
        device: The tokens'.
        starts: int64 ``[2, N]``, see :class:`OwnRows`.
    """
    parts = (split.first, before, split.rank, split.slot, split.end)
    more = () if starts is None else (starts.ravel(),)
    packed = _packed((*parts, *_own_rows(own, arrangement), *more), device)
    length, ranks = sum(map(len, parts)), len(own.sent)
    most = int((split.first[1:] - split.first[:-1]).max(initial=0))
    shares = Shares(packed[:length], split.num_experts, len(split.rank), most, ranks)
    if starts is None:
        return shares, OwnRows(packed[length:], ranks)
    return shares, OwnRows(packed[length : -2 * ranks], ranks, packed[-2 * ranks :].view(2, ranks))


def _own_rows(own: OwnPart, arrangement: Arrangement) -> tuple[np.ndarray, ...]:
    return own.sent.cumsum(), own.received.cumsum(), arrangement.places(), arrangement.ends()


def _packed(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    # int32: no micro-batch sends two thousand million tokens to one expert.
    packed = torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="unsafe"))
    return packed.to(device, non_blocking=True)


class Counted(NamedTuple):
    """A rank's choices, counted.

    Args:
        loads: int64 ``[E]``, choices of each expert.
        ends: int32 ``[E * B]`` where a kernel counted: where the choices of each expert in each of B blocks of
            consecutive tokens end, sorted by expert; it goes on from there.
    """

    loads: torch.Tensor
    ends: torch.Tensor | None = None


class Leaving(NamedTuple):
    """What leaves this rank.

    Args:
        row_token: int64 ``[at least R]``, the token of each row, by destination, then token.
        token_rows: int64 ``[T, min(K, N)]``, the rows of each token, by destination; -1 for none.
        choices: int64 ``[A]``, which ``t * K + k`` each assignment is, in the order they travel.
        message: int32 ``[A, 3]``: row at the destination, slot there, the bits of the float32 routing weight.
        ends: ``[2N, B]``, where the rows to each rank end in each of B blocks of consecutive tokens; then, counted on
            from there, where its choices do.
    """

    row_token: torch.Tensor
    token_rows: torch.Tensor
    choices: torch.Tensor
    message: torch.Tensor
    ends: torch.Tensor


class Arrived(NamedTuple):
    """What this rank serves, sorted by the places of its slots.

    Args:
        source_row: int64 ``[A]``, the received row of each assignment.
        arrival: int64 ``[A]``, when each assignment arrived.
        row_places: int64 ``[at least R, K]``, the sorted assignments of each received row, as they arrived; -1 for
            none.
        gates: float32 ``[A]``, routing weights.
        slot: int64 ``[A]``, slots.
    """

    source_row: torch.Tensor
    arrival: torch.Tensor
    row_places: torch.Tensor
    gates: torch.Tensor
    slot: torch.Tensor


def count(top_k_index: torch.Tensor, num_experts: int) -> Counted:
    """Counts choices int64 ``[T, K]`` of each expert."""
    if usable(top_k_index) and top_k_index.numel():
        from hf_laer.compute.kernels.routing import count as kernel

        return Counted(*kernel(top_k_index, num_experts))
    return Counted(_count(top_k_index.reshape(-1), num_experts))


def leave(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    shares: Shares,
    counted: Counted,
    starts: torch.Tensor | None = None,
) -> Leaving:
    """Sorts this rank's choices by destination.

    Args:
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        shares: Who serves what.
        counted: From :func:`count`.
        starts: int32 ``[N]``, where the rows that come back from each rank begin, if not one behind the other: so
            ``token_rows`` counts them.
    """
    if counted.ends is not None:
        from hf_laer.compute.kernels.routing import leave as kernel

        return Leaving(*kernel(top_k_index, top_k_weights, shares, counted.ends, starts))
    num_tokens, top_k = top_k_index.shape
    _, _, rank, slot, _ = shares.parts()
    replica = _replicas(top_k_index.reshape(-1), shares)
    destination = rank[replica]
    token = torch.arange(len(replica), device=replica.device) // top_k
    choices = torch.argsort(destination * max(num_tokens, 1) + token, stable=True)
    destination, token = destination[choices], token[choices]
    opens = _opens_row(destination, token)
    row = opens.cumsum(0) - 1
    row_token = torch.empty_like(token).scatter_(0, row, token)
    rows = _count(destination, shares.ranks, opens)
    first_row = rows.cumsum(0) - rows
    weights = top_k_weights.detach().reshape(-1)[choices].float().contiguous()
    columns = (row - first_row[destination], slot[replica[choices]], weights.view(torch.int32))
    message = torch.stack([column.to(torch.int32) for column in columns], 1)
    token_rows = torch.full((num_tokens, min(top_k, shares.ranks)), -1, dtype=torch.int64, device=token.device)
    nth = _nth_of(token, opens, num_tokens)
    back = row if starts is None else row + (starts.long() - first_row)[destination]
    token_rows[token[opens], nth[opens]] = back[opens]
    ends = torch.cat([rows, _count(destination, shares.ranks)]).cumsum(0)
    return Leaving(row_token, token_rows, choices, message, ends.unsqueeze(1))


def arrive(
    received: torch.Tensor,
    ends: torch.Tensor,
    rows: int,
    top_k: int,
    places_of: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> Arrived:
    """Sorts what arrived by slot, in the order of their places; assignments keep their order within a slot.

    Args:
        received: int32 ``[A, 3]``, the messages of all ranks, one after the other.
        ends: int32 ``[N]``, where the assignments of each rank end.
        rows: At least R.
        top_k: K.
        places_of: int32 ``[S]``, each slot's place in the order.
        starts: int32 ``[N]``, where the rows of each rank begin, if not one behind the other; then every row that is
            not there has no places.
    """
    if usable(received) and received.shape[0]:
        from hf_laer.compute.kernels.routing import arrive as kernel

        return Arrived(*kernel(received, ends, rows, top_k, places_of, starts))
    of_rank = row_counts(received, ends)
    choices = ends.diff(prepend=ends.new_zeros(1))
    first_rows = of_rank.cumsum(0) - of_rank if starts is None else starts.long()
    first_row = first_rows.repeat_interleave(choices, output_size=len(received))
    row = received[:, 0].long() + first_row
    arrival = torch.argsort(places_of[received[:, 1].long()], stable=True)
    sorted_place = torch.empty_like(arrival)
    sorted_place[arrival] = torch.arange(len(arrival), device=arrival.device)
    row_places = places(row, rows, top_k)
    if len(row):
        row_places = torch.where(row_places < 0, -1, sorted_place[row_places.clamp(min=0)])
    gates = received[:, 2].contiguous().view(torch.float32)[arrival]
    return Arrived(row[arrival], arrival, row_places, gates, received[arrival, 1].long())


def row_counts(message: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int64 ``[N]``: rows to or from each rank.

    Assignments travel in the order of their rows, so the last one of each rank says how many there are.

    Args:
        message: int32 ``[A, 3]``, what leaves or what arrived.
        ends: int32 ``[N]``, where the assignments of each rank end.
    """
    if not len(message):
        return ends.new_zeros(len(ends), dtype=torch.int64)
    last = message[(ends.long() - 1).clamp(min=0), 0].long() + 1
    return last.where(ends.diff(prepend=ends.new_zeros(1)) > 0, 0)


def rows_both_ways(message: torch.Tensor, received: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """int64 ``[2, N]``: rows to each rank and from each rank.

    Args:
        message: int32 ``[A_out, 3]``, what leaves.
        received: int32 ``[A_in, 3]``, what arrived.
        edges: int32 ``[2, N]``, where the assignments to and from each rank end.
    """
    if usable(message):
        from hf_laer.compute.kernels.routing import rows_both_ways as kernel

        return kernel(message, received, edges)
    return torch.stack([row_counts(message, edges[0]), row_counts(received, edges[1])])


def _replicas(expert: torch.Tensor, shares: Shares) -> torch.Tensor:
    """int64 ``[A]``: the replica that serves each choice, by its place in the expert's rank-major stream."""
    first, before, _, _, end = shares.parts()
    order = torch.argsort(expert, stable=True)
    ordered = expert[order]
    counts = _count(expert, shares.experts)
    place = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[ordered]
    place += before[ordered]
    # One search over all experts: positions of different experts are kept apart by a stride above any position.
    stride = torch.cat([end, end.new_zeros(1)]).amax() + 1
    sizes = first[1:] - first[:-1]
    owner = torch.arange(shares.experts, device=expert.device).repeat_interleave(sizes, output_size=shares.replicas)
    replica = torch.empty_like(expert)
    replica[order] = torch.searchsorted(owner * stride + end, ordered * stride + place, right=True)
    return replica


def _opens_row(destination: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """bool ``[A]``: whether an assignment is the first of its (destination, token)."""
    opens = torch.ones_like(token, dtype=torch.bool)
    opens[1:] = (destination[1:] != destination[:-1]) | (token[1:] != token[:-1])
    return opens


def _nth_of(token: torch.Tensor, opens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 ``[A]``: how many rows of the same token come before, where an assignment opens one."""
    order = torch.argsort(token, stable=True)
    opened = opens[order].long()
    before = opened.cumsum(0) - opened
    counts = _count(token, num_tokens, opens)
    nth = torch.empty_like(token)
    nth[order] = before - (counts.cumsum(0) - counts)[token[order]]
    return nth


def _count(values: torch.Tensor, bins: int, which: torch.Tensor | None = None) -> torch.Tensor:
    """int64 ``[bins]``, of those values that ``which`` (bool) marks.

    A scatter, since ``bincount`` waits for the device and is refused in deterministic mode.
    """
    ones = torch.ones_like(values) if which is None else which.to(values.dtype)
    return torch.zeros(bins, dtype=torch.int64, device=values.device).scatter_add_(0, values, ones)
