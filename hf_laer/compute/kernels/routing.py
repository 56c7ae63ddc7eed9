"""Routing tables in a few launches; the reference is :mod:`hf_laer.compute.routing`.

All of it is stable counting: how many elements with the same key come before each one. A program compares the keys of
its block with each other, a cumulative sum over blocks, key after key, gives where each block's share of a key begins.
No atomics, so the order never depends on timing.

Letters in shapes: A assignments, B blocks of assignments, E experts, N ranks, S slots, T tokens, K top-k, R rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from hf_laer.compute.routing import Shares

# Each program compares all pairs of its block.
_BLOCK = 128
# Bins of a histogram are a power of two, and no fewer than a warp has lanes. A rank's slots may be more in every step:
# up to so many they do not ask for another kernel.
_FEWEST_BINS, _FEWEST_OF_SLOTS = 32, 256


# Numbers that change from step to step are not specialized, nor is where tables begin, which are cut out of others:
# Triton would compile anew in the midst of training.
@triton.jit
def _same(key, BLOCK: tl.constexpr):
    """Pairs of equal keys, and of those the ones whose second element comes first."""
    lane = tl.arange(0, BLOCK)
    same = key[:, None] == key[None, :]
    return same, same & (lane[None, :] < lane[:, None])


@triton.jit
def _how_many(pairs):
    return tl.sum(pairs.to(tl.int32), 1)


@triton.jit
def _start(ends, at, inside):
    """Where the ``at``-th count begins, given where each one ends."""
    return tl.load(ends + at - 1, mask=inside & (at > 0), other=0)


@triton.jit
def _store_counts(table, key, blocks, bins, BINS: tl.constexpr):
    """Elements of each key in this block, into its column of ``[bins, B]``; keys from ``bins`` on are left out."""
    bin = tl.arange(0, BINS)
    tl.store(table + bin * blocks + tl.program_id(0), tl.histogram(key, BINS), mask=bin < bins)


@triton.jit(do_not_specialize=["total", "blocks", "bins"], do_not_specialize_on_alignment=["keys", "places"])
def _count_kernel(
    keys, places, table, total, blocks, bins, stride, per, PLACED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """Elements of each key, or of its place if there are places, in each block of ``per``, ``[bins, B]``."""
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * per + lane
    inside = (lane < per) & (at < total)
    key = tl.load(keys + at.to(tl.int64) * stride, mask=inside, other=bins).to(tl.int32)
    if PLACED:
        key = tl.load(places + key, mask=inside, other=bins)
    _store_counts(table, key, blocks, bins, BINS)


@triton.jit(do_not_specialize=["blocks"])
def _loads_kernel(ends, loads, blocks, bins, BLOCK: tl.constexpr):
    """How many there are of each key, from where the counts in its blocks end."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = key < bins
    stop = tl.load(ends + (key + 1) * blocks - 1, mask=inside, other=0)
    tl.store(loads + key, (stop - _start(ends, key * blocks, inside)).to(tl.int64), mask=inside)


@triton.jit(
    do_not_specialize=["total", "blocks", "replicas", "halves"],
    do_not_specialize_on_alignment=["keys", "shares"],
)
def _open_kernel(
    keys, ends, shares, opened, table, total, blocks, replicas, halves, experts, ranks,
    K: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The replica of each choice, by its place in its expert's stream; whether it is its token's first for that rank.

    Also rows and choices of each rank in each block, ``[2 N, B]``. Blocks are of whole tokens.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * PER + lane
    inside = (lane < PER) & (at < total)
    key = tl.load(keys + at, mask=inside, other=-1).to(tl.int32)
    _, earlier = _same(key, BLOCK)
    key = tl.where(inside, key, 0)
    place = _how_many(earlier) + _start(ends, key * blocks + block, inside) - _start(ends, key * blocks, inside)
    place += tl.load(shares + experts + 1 + key, mask=inside, other=0)
    own = tl.load(shares + key, mask=inside, other=0)
    last = tl.load(shares + key + 1, mask=inside, other=0) - 1
    rank = shares + 2 * experts + 1
    part_end = rank + 2 * replicas
    # Ends ascend: half of the replicas that are left is looked at each time.
    for _ in range(halves):
        searched, middle = inside & (own < last), (own + last) >> 1
        beyond = searched & (place >= tl.load(part_end + middle, mask=searched, other=0))
        own, last = tl.where(beyond, middle + 1, own), tl.where(searched & (beyond == 0), middle, last)
    to = tl.load(rank + own, mask=inside, other=ranks)
    token = lane // K
    _, before = _same(to, BLOCK)
    opens = inside & (_how_many(before & (token[:, None] == token[None, :])) == 0)
    tl.store(opened + at, 2 * own + opens.to(tl.int32), mask=inside)
    _store_counts(table, tl.where(opens, to, ranks), blocks, ranks, BINS)
    _store_counts(table + ranks * blocks, to, blocks, ranks, BINS)


@triton.jit(
    do_not_specialize=["total", "blocks"],
    do_not_specialize_on_alignment=["rank", "slot", "gates", "row_token", "choices", "starts"],
)
def _leave_kernel(
    opened, rank, slot, ends, gates, row_token, token_rows, choices, message, starts, total, blocks, ranks,
    STARTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the tables of what leaves; each token's first choice also fills what its others leave empty."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * PER + lane
    inside = (lane < PER) & (at < total)
    own = tl.load(opened + at, mask=inside, other=0)
    opens = inside & ((own & 1) == 1)
    own = own >> 1
    to = tl.load(rank + own, mask=inside, other=-1)
    _, earlier = _same(to, BLOCK)
    to = tl.where(inside, to, 0)
    rows = tl.load(ends + ranks * blocks - 1)
    first_row = _start(ends, to * blocks, inside)
    row = _start(ends, to * blocks + block, inside) + _how_many(earlier & opens[None, :]) - 1 + opens.to(tl.int32)
    travels = _start(ends, (ranks + to) * blocks + block, inside) - rows + _how_many(earlier)
    token = at // K
    nth, distinct = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(K):
        other = tl.load(opened + token * K + k, mask=inside, other=0)
        first = other & 1
        distinct += first
        nth += tl.where(tl.load(rank + (other >> 1), mask=inside, other=0) < to, first, 0)
    tl.store(choices + travels, at.to(tl.int64), mask=inside)
    tl.store(message + travels * 3, row - first_row, mask=inside)
    tl.store(message + travels * 3 + 1, tl.load(slot + own, mask=inside, other=0), mask=inside)
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(message + travels * 3 + 2, gate.to(tl.int32, bitcast=True), mask=inside)
    tl.store(row_token + row, token.to(tl.int64), mask=opens)
    if STARTS:
        row += tl.load(starts + to, mask=inside, other=0) - first_row
    tl.store(token_rows + token * WIDTH + nth, row.to(tl.int64), mask=opens)
    empty = tl.full([BLOCK], -1, tl.int64)
    for column in tl.static_range(WIDTH):
        tl.store(token_rows + token * WIDTH + column, empty, mask=inside & (at % K == 0) & (column >= distinct))


@triton.jit(do_not_specialize_on_alignment=["sent", "received", "edges"])
def _rows_kernel(sent, received, edges, rows, ranks, BLOCK: tl.constexpr):
    """Rows to each rank by one program, from each rank by the other: the last assignment's, and one."""
    side = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < ranks
    stop = tl.load(edges + side * ranks + at, mask=inside, other=0)
    some = inside & (stop > _start(edges + side * ranks, at, inside))
    if side == 0:
        last = tl.load(sent + (stop - 1) * 3, mask=some, other=-1)
    else:
        last = tl.load(received + (stop - 1) * 3, mask=some, other=-1)
    tl.store(rows + side * ranks + at, (last + 1).to(tl.int64), mask=inside)


@triton.jit
def _source(received, stops, starts, at, ranks, STARTS: tl.constexpr):
    """Where the source of each arrival begins, among assignments and among rows."""
    start, first_row = tl.zeros_like(at), tl.zeros_like(at)
    done, rows = 0, 0
    for source in range(ranks):
        stop = tl.load(stops + source)
        if STARTS:
            rows = tl.load(starts + source + 1, mask=source + 1 < ranks, other=0)
        else:
            rows += tl.load(received + (stop - 1) * 3, mask=stop > done, other=-1) + 1
        done = stop
        later = at >= done
        start = tl.where(later, done, start)
        first_row = tl.where(later, rows, first_row)
    return start, first_row


@triton.jit(
    do_not_specialize=["total", "blocks"],
    do_not_specialize_on_alignment=["received", "stops", "places", "source_row", "arrival", "slots", "starts"],
)
def _arrive_kernel(
    received, stops, ends, places, source_row, arrival, row_places, gates, slots, starts, total, blocks, ranks,
    STARTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the tables of what arrived; each row's last assignment also fills the places that stay empty."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
    row = tl.load(received + at * 3, mask=inside, other=-1)
    slot = tl.load(received + at * 3 + 1, mask=inside, other=-1)
    gate = tl.load(received + at * 3 + 2, mask=inside, other=0)
    key = tl.load(places + slot, mask=inside, other=-1)
    _, earlier = _same(key, BLOCK)
    place = _how_many(earlier) + _start(ends, key * blocks + block, inside)
    start, first_row = _source(received, stops, starts, at, ranks, STARTS)
    nth = tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(1, K):
        there = inside & (at - back >= start)
        nth += (there & (tl.load(received + (at - back) * 3, mask=there, other=-2) == row)).to(tl.int32)
    more = inside & (at + 1 < total)
    next_row = tl.load(received + (at + 1) * 3, mask=more, other=-2)
    next_start, _ = _source(received, stops, starts, at + 1, ranks, STARTS)
    is_last = inside & ((next_row != row) | (next_start != start))
    row = (row + first_row).to(tl.int64)
    tl.store(source_row + place, row, mask=inside)
    tl.store(arrival + place, at.to(tl.int64), mask=inside)
    tl.store(gates + place, gate.to(tl.float32, bitcast=True), mask=inside)
    tl.store(slots + place, slot.to(tl.int64), mask=inside)
    tl.store(row_places + row * K + nth, place.to(tl.int64), mask=inside)
    empty = tl.full([BLOCK], -1, tl.int64)
    for column in tl.static_range(1, K):
        tl.store(row_places + row * K + column, empty, mask=is_last & (column > nth))


def _bins(keys: int) -> int:
    """A histogram's bins: one more than there are keys, for elements that are left out."""
    return max(_FEWEST_BINS, next_power_of_2(keys + 1))


def _ends(
    keys: torch.Tensor, total: int, stride: int, per: int, bins: int, places: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 ``[bins * B]``: where the elements of each key in each block of ``per`` end, sorted by key or its place."""
    blocks = cdiv(total, per)
    table = torch.empty(bins * blocks, dtype=torch.int32, device=keys.device)
    tensors, numbers = (keys, keys if places is None else places, table), (total, blocks, bins)
    constants = stride, per, places is not None, _BLOCK, max(_FEWEST_OF_SLOTS, _bins(bins))
    launch(_count_kernel, (blocks,), tensors, numbers, constants)
    return table.cumsum(0, dtype=torch.int32)


def _per_block(top_k: int) -> int:
    """Choices in a block, of whole tokens."""
    if top_k > _BLOCK:
        raise ValueError(f"{top_k} experts per token are more than the {_BLOCK} that routing tables are made for")
    return _BLOCK // top_k * top_k


def count(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; there is at least one choice."""
    per = _per_block(top_k_index.shape[1])
    ends = _ends(top_k_index.contiguous(), top_k_index.numel(), 1, per, num_experts)
    loads = torch.empty(num_experts, dtype=torch.int64, device=ends.device)
    blocks = ends.shape[0] // num_experts
    launch(_loads_kernel, (cdiv(num_experts, _BLOCK),), (ends, loads), (blocks,), (num_experts, _BLOCK))
    return loads, ends


def leave(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    shares: Shares,
    ends: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """See the reference; there is at least one choice. ``ends`` as :func:`count` gives them."""
    tokens, top_k = top_k_index.shape
    total, ranks, device = top_k_index.numel(), shares.ranks, top_k_index.device
    per, width = _per_block(top_k), min(top_k, ranks)
    blocks = cdiv(total, per)
    keys, gates = top_k_index.contiguous(), top_k_weights.detach().contiguous()
    row_token, choices = torch.empty(2, total, dtype=torch.int64, device=device).unbind()
    opened = torch.empty(total, dtype=torch.int32, device=device)
    table = torch.empty(2 * ranks * blocks, dtype=torch.int32, device=device)
    # Halvings after which one of the most replicas that an expert has is left.
    numbers = total, blocks, shares.replicas, (shares.most - 1).bit_length()
    tensors, constants = (keys, ends, shares.packed, opened, table), (shares.experts, ranks, top_k, per, _BLOCK)
    launch(_open_kernel, (blocks,), tensors, numbers, (*constants, _bins(ranks)))
    token_rows = torch.empty(tokens, width, dtype=torch.int64, device=device)
    message = torch.empty(total, 3, dtype=torch.int32, device=device)
    first, replicas = 2 * shares.experts + 1, shares.replicas
    rank, slot = shares.packed[first : first + replicas], shares.packed[first + replicas : first + 2 * replicas]
    stops = table.cumsum(0, dtype=torch.int32)
    tables = opened, rank, slot, stops, gates, row_token, token_rows, choices, message, starts
    kind = ranks, starts is not None, top_k, width, per, _BLOCK
    launch(_leave_kernel, (blocks,), tables, (total, blocks), kind)
    return row_token, token_rows, choices, message, stops.view(2 * ranks, blocks)


def rows_both_ways(message: torch.Tensor, received: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    rows = torch.empty_like(edges, dtype=torch.int64)
    ranks = edges.shape[1]
    launch(_rows_kernel, (2,), (message, received, edges, rows), (), (ranks, next_power_of_2(ranks)))
    return rows


def arrive(
    received: torch.Tensor,
    stops: torch.Tensor,
    rows: int,
    top_k: int,
    places: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """See the reference; at least one assignment arrived."""
    total, device = received.shape[0], received.device
    blocks = cdiv(total, _BLOCK)
    received = received.contiguous()
    ends = _ends(received[:, 1], total, 3, _BLOCK, places.shape[0], places)
    source_row, arrival, slot = torch.empty(3, total, dtype=torch.int64, device=device).unbind()
    row_places = torch.empty(rows, top_k, dtype=torch.int64, device=device)
    if starts is not None:
        # Rows that are not there are written by nobody.
        row_places.fill_(-1)
    gates = torch.empty(total, dtype=torch.float32, device=device)
    tables = received, stops, ends, places, source_row, arrival, row_places, gates, slot, starts
    launch(_arrive_kernel, (blocks,), tables, (total, blocks), (stops.shape[0], starts is not None, top_k, _BLOCK))
    return source_row, arrival, row_places, gates, slot
