"""Sum of rows over the places they were gathered to; the reference is :func:`hf_laer.compute.rows.gather_sum`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2
from hf_laer.compute.kernels.places import NUMBERS, eight, one_of, rank_of, start_of, store_row


# Cut out of others where rows come in chunks, and read one number at a time.
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["table", "weights", "slot"])
def _gather_sum_kernel(
    values, table, weights, bias, slot, out,
    b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7, scale,
    stride: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    # In the order of places: the sum is the same in every run.
    for k in range(width):
        place = tl.load(table + row * width + k)
        if place >= 0:
            at = values + place * columns
            if FROM:
                rank = rank_of(place, e0, e1, e2, e3, e4, e5, e6, FROM)
                at = values + rank * stride + (place - start_of(rank, e0, e1, e2, e3, e4, e5, e6, FROM)) * columns
            part = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                base = tl.load(slot + place).to(tl.int64) * columns
                part += tl.load(bias + base + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                part *= tl.load(weights + place)
            total += part
    total *= scale
    if TO:
        rank = rank_of(row, e0, e1, e2, e3, e4, e5, e6, TO)
        base = one_of(rank, b0, b1, b2, b3, b4, b5, b6, b7, TO)
        start = start_of(rank, e0, e1, e2, e3, e4, e5, e6, TO)
        store_row(base, out, row - start, column, total, inside, columns, BLOCK)
    else:
        tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def gather_sum(
    values: torch.Tensor,
    table: torch.Tensor,
    out_dtype: torch.dtype,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    slot: torch.Tensor | None,
    scale: float = 1.0,
) -> torch.Tensor:
    """See the reference. One program per row and block of columns; float32 accumulation, no atomics."""
    out = torch.empty(table.shape[0], values.shape[1], dtype=out_dtype, device=values.device)
    _launch((values.contiguous(), table, weights, bias, slot, out), scale)
    return out


def gather_sum_from(
    places: torch.Tensor, stride: int, ends: Sequence[int], table: torch.Tensor, out_dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """As :func:`gather_sum`, of rows that lie apart.

    Args:
        places: ``[at least M', H]``, where the rows of the first rank begin.
        stride: Elements from where each rank's rows begin to where the next one's do.
        ends: For each rank, where its rows end in the count that ``table`` uses.
        table: int64 ``[R, width]``; -1 for none.
        out_dtype: Dtype of the result.
        scale: A factor for each sum.
    """
    out = torch.empty(table.shape[0], places.shape[1], dtype=out_dtype, device=places.device)
    _launch((places, table, None, None, None, out), scale, ends=ends, stride=stride)
    return out


def gather_sum_to(
    values: torch.Tensor,
    table: torch.Tensor,
    like: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    slot: torch.Tensor | None,
    ends: Sequence[int],
    bases: Sequence[int],
) -> None:
    """As :func:`gather_sum`, in the dtype of ``like``; sums up to each of ``ends`` go to one of ``bases``."""
    _launch((values.contiguous(), table, weights, bias, slot, like), 1.0, ends=ends, bases=bases)


def _launch(
    tensors: tuple[torch.Tensor | None, ...],
    scale: float,
    ends: Sequence[int] = (),
    bases: Sequence[int] = (),
    stride: int = 0,
) -> None:
    values, table, weights, bias, *_ = tensors
    assert values is not None
    assert table is not None
    (rows, width), columns = table.shape, values.shape[1]
    if rows * columns == 0:
        return
    block = min(1024, next_power_of_2(columns))
    ranks = 0 if bases else len(ends), len(bases)
    constants = stride, columns, width, weights is not None, bias is not None, *ranks, block
    numbers = *eight(bases), *eight(ends), float(scale)
    launch(_gather_sum_kernel, (rows, cdiv(columns, block)), tensors, numbers, constants)
