"""Rows written where other ranks read them; the references are in :mod:`hf_laer.comm.places`.

Letters in shapes: A assignments, B blocks of assignments, E experts, N ranks, R rows, T tokens, K top-k, H columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels import MOST_RANKS
from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2
from hf_laer.compute.kernels.places import BASES, NUMBERS, eight, one_of, rank_of, start_of, store_row

_BLOCK, _FLAT = 1024, 2048
_TOLD = [f"t{at}" for at in range(MOST_RANKS)]
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=[*NUMBERS, "total"], do_not_specialize_on_alignment=["source"])
def _put_kernel(
    source, b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7, total,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Words, one after the other, those to each rank to the start of its place there."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    rank = rank_of(at, e0, e1, e2, e3, e4, e5, e6, RANKS)
    start = start_of(rank, e0, e1, e2, e3, e4, e5, e6, RANKS)
    base = one_of(rank, b0, b1, b2, b3, b4, b5, b6, b7, RANKS)
    target = base.to(tl.pointer_type(source.dtype.element_ty)) + (at - start)
    tl.store(target, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def _put_row(source, index, row, start, base, columns, BLOCK: tl.constexpr):
    """A block of one row's columns."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    token = tl.load(index + row)
    value = tl.load(source + token * columns + column, mask=inside)
    store_row(base, source, row - start, column, value, inside, columns, BLOCK)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["index"])
def _put_rows_kernel(
    source, index, b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7,
    columns: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that ``index`` names, those to each rank to the start of its place there."""
    row = tl.program_id(0).to(tl.int64)
    rank = rank_of(row, e0, e1, e2, e3, e4, e5, e6, RANKS)
    start = start_of(rank, e0, e1, e2, e3, e4, e5, e6, RANKS)
    base = one_of(rank, b0, b1, b2, b3, b4, b5, b6, b7, RANKS)
    _put_row(source, index, row, start, base, columns, BLOCK)


@triton.jit
def _put_messages(
    message, ends, block, b0, b1, b2, b3, b4, b5, b6, b7, blocks, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of the messages' words, three for each choice."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    all_rows = tl.load(ends + RANKS * blocks - 1).to(tl.int64)
    rank, start, inside = at * 0, at * 0, at < 0
    for one in tl.static_range(RANKS):
        stop = (tl.load(ends + (RANKS + one + 1) * blocks - 1).to(tl.int64) - all_rows) * 3
        rank += (at >= stop).to(tl.int64)
        start = tl.where(at >= stop, stop, start)
        inside = at < stop
    base = one_of(rank, b0, b1, b2, b3, b4, b5, b6, b7, RANKS)
    target = base.to(tl.pointer_type(tl.int32)) + (at - start)
    tl.store(target, tl.load(message + at, mask=inside), mask=inside)


@triton.jit
def _tell(loads, ends, target, blocks, experts, RANKS: tl.constexpr, TOLD: tl.constexpr):
    """Loads, and where rows to each rank end."""
    at = tl.arange(0, TOLD)
    tl.store(target + at, tl.load(loads + at, mask=at < experts), mask=at < experts)
    last = tl.load(ends + (at + 1) * blocks - 1, mask=at < RANKS)
    tl.store(target + experts + at, last.to(tl.int64), mask=at < RANKS)


@triton.jit(
    do_not_specialize=[*BASES, *_TOLD, "rows", "choices", "blocks"],
    do_not_specialize_on_alignment=["index", "message", "loads", "ends"],
)
def _put_all_kernel(
    source, index, message, loads, ends, b0, b1, b2, b3, b4, b5, b6, b7, t0, t1, t2, t3, t4, t5, t6, t7,
    rows, choices, blocks,
    behind: tl.constexpr, experts: tl.constexpr, columns: tl.constexpr, RANKS: tl.constexpr,
    MESSAGES: tl.constexpr, TELLS: tl.constexpr, TOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a rank has for others, where only the device knows how much that is.

    First the rows, one by one and as many as there may be; then the words of the messages; then what each rank is told.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < rows:
        rank, start, stop = program * 0, program * 0, program * 0
        for one in tl.static_range(RANKS):
            stop = tl.load(ends + (one + 1) * blocks - 1).to(tl.int64)
            rank += (program >= stop).to(tl.int64)
            start = tl.where(program >= stop, stop, start)
        if program < stop:
            base = one_of(rank, b0, b1, b2, b3, b4, b5, b6, b7, RANKS) + behind
            _put_row(source, index, program, start, base, columns, BLOCK)
    elif tl.program_id(1) == 0:
        block = program - rows
        if block < choices:
            if MESSAGES:
                _put_messages(message, ends, block, b0, b1, b2, b3, b4, b5, b6, b7, blocks, RANKS, BLOCK)
        elif TELLS:
            base = one_of(block - choices, t0, t1, t2, t3, t4, t5, t6, t7, RANKS)
            _tell(loads, ends, base.to(tl.pointer_type(tl.int64)), blocks, experts, RANKS, TOLD)


def put(tensor: torch.Tensor, ends: Sequence[int], bases: Sequence[int]) -> None:
    """``[R, …]``, the rows up to each of ``ends`` to the address in ``bases``, one after the other."""
    tensor = tensor.contiguous()
    row_bytes = tensor[:1].numel() * tensor.itemsize
    size = next(size for size in _WORDS if row_bytes % size == 0 and tensor.data_ptr() % size == 0)
    words = tensor.view(-1).view(_WORDS[size])
    each = row_bytes // size
    numbers = (*eight(bases), *eight([end * each for end in ends]), len(words))
    launch(_put_kernel, (cdiv(len(words), _FLAT),), (words,), numbers, (len(ends), _FLAT))


def put_rows(tokens: torch.Tensor, index: torch.Tensor, ends: Sequence[int], bases: Sequence[int]) -> None:
    """The rows ``[R]`` of ``[T, H]`` that ``index`` names, as :func:`put`; addresses are multiples of 16."""
    columns = tokens.shape[1]
    block = min(_BLOCK, next_power_of_2(columns))
    grid, numbers = (ends[-1], cdiv(columns, block)), (*eight(bases), *eight(ends))
    launch(_put_rows_kernel, grid, (tokens.contiguous(), index), numbers, (columns, len(ends), block))


def put_all(
    tokens: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    most: int,
    bases: Sequence[int],
    behind: int,
    message: torch.Tensor | None = None,
    loads: torch.Tensor | None = None,
    told: Sequence[int] = (),
) -> None:
    """What a rank has for others, where only the device knows how much that is.

    Args:
        tokens: ``[T, H]``.
        index: int64 ``[at least R]``, the rows that leave.
        ends: ``[at least N, B]``, where those to each rank end, in the last column; then where its choices do, counted
            on from there.
        most: No more rows than this leave.
        bases: Addresses of this rank's place on each rank, multiples of 16; messages come first.
        behind: So many bytes behind come the rows, likewise.
        message: int32 ``[A, 3]``, if there is one.
        loads: int64 ``[E]``, if they are told.
        told: Addresses on each rank for int64 ``[E + N]``: loads, and where rows to each rank end.
    """
    columns, ranks, experts = tokens.shape[1], len(bases), 0 if loads is None else len(loads)
    block = min(_BLOCK, next_power_of_2(columns))
    choices = 0 if message is None else cdiv(message.numel(), block)
    grid = most + choices + len(told), cdiv(columns, block) if most else 1
    tensors = tokens.contiguous(), index, message, loads, ends
    numbers = (*eight(bases), *eight(told), most, choices, ends.shape[1])
    kinds = message is not None, loads is not None, next_power_of_2(max(experts, ranks))
    launch(_put_all_kernel, grid, tensors, numbers, (behind, experts, columns, ranks, *kinds, block))
