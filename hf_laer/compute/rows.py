"""Gathers of rows and their adjoint, a sum over the places a row was gathered to. Deterministic: no atomics."""

from __future__ import annotations

import torch


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


def gather_sum(values: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sums for each row the values at its places, in float32 and in a fixed order.

    Args:
        values: ``[M, H]``.
        table: int64 ``[R, width]`` of positions in ``values``; -1 for none.
        weights: ``[M]``, a factor for each value, or ``None``.

    Returns:
        float32 ``[R, H]``.
    """
    total = values.new_zeros(table.shape[0], values.shape[1], dtype=torch.float32)
    if len(values) == 0:
        return total
    for column in table.unbind(1):
        there = column.clamp(min=0)
        part = values[there].float()
        if weights is not None:
            part.mul_(weights[there].float().unsqueeze(1))
        # Not a product with zero: an infinity that belongs to another row must not become NaN here.
        total.add_(part.masked_fill_((column < 0).unsqueeze(1), 0.0))
    return total
