"""Gathers of rows and their adjoint, a sum over the places a row was gathered to. Deterministic: no atomics."""

from __future__ import annotations

import torch

from hf_laer.compute.kernels import usable


def places(index: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Inverts a many-to-one index.

    Args:
        index: int64 ``[M]``, values below ``num_rows``, none more often than ``width`` times.
        num_rows: Rows of the table.
        width: Columns of the table.

    Returns:
        int64 ``[num_rows, width]``: the positions in ``index`` of each row, ascending; -1 where there are fewer.
    """
    order = torch.argsort(index, stable=True)
    ordered = index[order]
    starts = torch.searchsorted(ordered, torch.arange(num_rows, device=index.device))
    column = torch.arange(len(index), device=index.device) - starts[ordered]
    table = torch.full((num_rows, width), -1, dtype=torch.int64, device=index.device)
    table[ordered, column] = order
    return table


def gather_sum(
    values: torch.Tensor,
    table: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    slot: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Sums for each row the values at its places, in float32 and in a fixed order.

    Args:
        values: ``[M, H]``.
        table: int64 ``[R, width]`` of positions in ``values``; -1 for none.
        out_dtype: Dtype of the result.
        weights: float32 ``[M]``, a factor for each value, or ``None``.
        bias: ``[S, H]``, added to each value before its factor, or ``None``.
        slot: int64 ``[M]``, each value's row of ``bias``.
        scale: A factor for each sum, before it is rounded.

    Returns:
        ``[R, H]`` in ``out_dtype``.
    """
    if usable(values):
        from hf_laer.compute.kernels.rows import gather_sum as kernel

        return kernel(values, table, out_dtype, weights, bias, slot, scale)
    total = values.new_zeros(table.shape[0], values.shape[1], dtype=torch.float32)
    if len(values) == 0:
        return total.to(out_dtype)
    for column in table.unbind(1):
        there = column.clamp(min=0)
        part = values[there].float()
        if bias is not None and slot is not None:
            part += bias[slot[there]].float()
        if weights is not None:
            part.mul_(weights[there].unsqueeze(1))
        # Not a product with zero: an infinity that belongs to another row must not become NaN here.
        total.add_(part.masked_fill_((column < 0).unsqueeze(1), 0.0))
    return total.mul_(scale).to(out_dtype)
