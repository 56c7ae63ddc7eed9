"""Sum of rows over the places they were gathered to; the reference is :func:`hf_laer.compute.rows.gather_sum`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2


# Cut out of others where rows come in chunks, and read one number at a time.
@triton.jit(do_not_specialize_on_alignment=["table", "weights", "slot"])
def _gather_sum_kernel(
    values, table, weights, bias, slot, out, scale, columns, width: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    # In the order of places: the sum is the same in every run.
    for k in range(width):
        place = tl.load(table + row * width + k)
        if place >= 0:
            part = tl.load(values + place * columns + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                base = tl.load(slot + place).to(tl.int64) * columns
                part += tl.load(bias + base + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                part *= tl.load(weights + place)
            total += part
    tl.store(out + row * columns + column, (total * scale).to(out.dtype.element_ty), mask=inside)


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
    rows, width = table.shape
    columns = values.shape[1]
    out = torch.empty(rows, columns, dtype=out_dtype, device=values.device)
    if out.numel() == 0:
        return out
    block = min(1024, next_power_of_2(columns))
    tensors = values.contiguous(), table, weights, bias, slot, out
    constants = columns, width, weights is not None, bias is not None, block
    launch(_gather_sum_kernel, (rows, cdiv(columns, block)), tensors, (float(scale),), constants)
    return out
