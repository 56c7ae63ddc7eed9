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

if TYPE_CHECKING:
    from hf_laer.compute.routing import Shares

# Each program compares all pairs of its block.
_BLOCK = 128


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
def _count_kernel(keys, table, total, stride, blocks, BLOCK: tl.constexpr):
    """Elements of each key in each block, ``[keys, B]``; the table is zero before."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
    key = tl.load(keys + at.to(tl.int64) * stride, mask=inside, other=-1).to(tl.int32)
    same, earlier = _same(key, BLOCK)
    many = _how_many(same)
    is_last = _how_many(earlier) == many - 1
    tl.store(table + key * blocks + block, many, mask=inside & is_last)


@triton.jit
def _replica_kernel(keys, ends, shares, replica, total, blocks, experts, replicas, most, BLOCK: tl.constexpr):
    """The replica of each choice, by its place in its expert's stream."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
    key = tl.load(keys + at, mask=inside, other=-1).to(tl.int32)
    _, earlier = _same(key, BLOCK)
    key = tl.where(inside, key, 0)
    place = _how_many(earlier) + _start(ends, key * blocks + block, inside) - _start(ends, key * blocks, inside)
    place += tl.load(shares + experts + 1 + key, mask=inside, other=0)
    found = tl.load(shares + key, mask=inside, other=0)
    last = tl.load(shares + key + 1, mask=inside, other=0) - 1
    part_end = shares + 2 * experts + 1 + 2 * replicas
    for _ in range(most - 1):
        beyond = inside & (found < last)
        beyond &= place >= tl.load(part_end + found, mask=beyond, other=0)
        found += beyond.to(tl.int32)
    tl.store(replica + at, found, mask=inside)


@triton.jit
def _open_kernel(replica, rank, opened, table, total, blocks, ranks, K: tl.constexpr, BLOCK: tl.constexpr):
    """Which choices are the first of their token for their rank; rows and choices of each rank in each block."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
    own = tl.load(replica + at, mask=inside, other=0)
    to = tl.load(rank + own, mask=inside, other=-1)
    opens = inside
    for back in tl.static_range(1, K):
        there = inside & (at % K >= back)
        other = tl.load(replica + at - back, mask=there, other=0)
        opens &= ~(there & (tl.load(rank + other, mask=there, other=-1) == to))
    tl.store(opened + at, 2 * own + opens.to(tl.int32), mask=inside)
    same, earlier = _same(to, BLOCK)
    many = _how_many(same)
    is_last = inside & (_how_many(earlier) == many - 1)
    tl.store(table + to * blocks + block, _how_many(same & opens[None, :]), mask=is_last)
    tl.store(table + (ranks + to) * blocks + block, many, mask=is_last)


@triton.jit
def _leave_kernel(
    opened, rank, slot, ends, gates, row_token, token_rows, choices, message, total, blocks, ranks,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the tables of what leaves; each token's first choice also fills what its others leave empty."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
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
    tl.store(token_rows + token * WIDTH + nth, row.to(tl.int64), mask=opens)
    empty = tl.full([BLOCK], -1, tl.int64)
    for column in tl.static_range(WIDTH):
        tl.store(token_rows + token * WIDTH + column, empty, mask=inside & (at % K == 0) & (column >= distinct))


@triton.jit
def _source(sizes, at, total, ranks):
    """Where the source of each arrival begins, among assignments and among rows."""
    start, first_row = tl.zeros_like(at), tl.zeros_like(at)
    done, rows = 0, 0
    for source in range(ranks):
        rows += tl.load(sizes + 2 * source).to(tl.int32)
        done += tl.load(sizes + 2 * source + 1).to(tl.int32)
        later = at >= done
        start = tl.where(later, done, start)
        first_row = tl.where(later, rows, first_row)
    return start, first_row


@triton.jit
def _arrive_kernel(
    received, sizes, ends, source_row, arrival, row_places, gates, slots, total, blocks, ranks,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the tables of what arrived; each row's last assignment also fills the places that stay empty."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < total
    row = tl.load(received + at * 3, mask=inside, other=-1)
    slot = tl.load(received + at * 3 + 1, mask=inside, other=-1)
    gate = tl.load(received + at * 3 + 2, mask=inside, other=0)
    _, earlier = _same(slot, BLOCK)
    place = _how_many(earlier) + _start(ends, slot * blocks + block, inside)
    start, first_row = _source(sizes, at, total, ranks)
    nth = tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(1, K):
        there = inside & (at - back >= start)
        nth += (there & (tl.load(received + (at - back) * 3, mask=there, other=-2) == row)).to(tl.int32)
    more = inside & (at + 1 < total)
    next_row = tl.load(received + (at + 1) * 3, mask=more, other=-2)
    next_start, _ = _source(sizes, at + 1, total, ranks)
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


def _ends(keys: torch.Tensor, total: int, stride: int, bins: int) -> torch.Tensor:
    """int32 ``[bins * B]``: where each block's elements of each key end, sorted by key."""
    blocks = triton.cdiv(total, _BLOCK)
    table = torch.zeros(bins * blocks, dtype=torch.int32, device=keys.device)
    _count_kernel[(blocks,)](keys, table, total, stride, blocks, BLOCK=_BLOCK)
    return table.cumsum(0, dtype=torch.int32)


def leave(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, shares: Shares) -> tuple[torch.Tensor, ...]:
    """See the reference; there is at least one choice."""
    tokens, top_k = top_k_index.shape
    total, ranks, device = top_k_index.numel(), shares.ranks, top_k_index.device
    blocks, width = triton.cdiv(total, _BLOCK), min(top_k, ranks)
    keys, gates = top_k_index.contiguous(), top_k_weights.detach().contiguous()
    whole = torch.empty(3 * total, dtype=torch.int64, device=device)
    row_token, choices, halves = whole.split(total)
    replica, opened = halves.view(torch.int32).split(total)
    rank, slot, _ = shares.packed[2 * shares.experts + 1 :].split(shares.replicas)
    ends = _ends(keys, total, 1, shares.experts)
    _replica_kernel[(blocks,)](
        keys, ends, shares.packed, replica, total, blocks, shares.experts, shares.replicas, shares.most, BLOCK=_BLOCK
    )
    table = torch.zeros(2 * ranks * blocks, dtype=torch.int32, device=device)
    _open_kernel[(blocks,)](replica, rank, opened, table, total, blocks, ranks, K=top_k, BLOCK=_BLOCK)
    token_rows = torch.empty(tokens, width, dtype=torch.int64, device=device)
    message = torch.empty(total, 3, dtype=torch.int32, device=device)
    _leave_kernel[(blocks,)](
        opened, rank, slot, table.cumsum(0, dtype=torch.int32), gates,
        row_token, token_rows, choices, message, total, blocks, ranks, K=top_k, WIDTH=width, BLOCK=_BLOCK,
    )  # fmt: skip
    sizes = table.view(2, ranks, blocks).sum(2).t().contiguous()
    return row_token, token_rows, choices, sizes, message


def arrive(received: torch.Tensor, sizes: torch.Tensor, rows: int, top_k: int, slots: int) -> tuple[torch.Tensor, ...]:
    """See the reference; at least one assignment arrived."""
    total, device = len(received), received.device
    blocks = triton.cdiv(total, _BLOCK)
    received = received.contiguous()
    ends = _ends(received[:, 1], total, 3, slots)
    source_row, arrival, slot = torch.empty(3, total, dtype=torch.int64, device=device)
    row_places = torch.empty(rows, top_k, dtype=torch.int64, device=device)
    gates = torch.empty(total, dtype=torch.float32, device=device)
    _arrive_kernel[(blocks,)](
        received, sizes, ends, source_row, arrival, row_places, gates, slot, total, blocks, len(sizes),
        K=top_k, BLOCK=_BLOCK,
    )  # fmt: skip
    return source_row, arrival, row_places, gates, slot
