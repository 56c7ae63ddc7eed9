"""Products of rows grouped by slot: the fast kernel where it applies, a loop over groups elsewhere.

Letters in shapes: A rows sorted by slot, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_ALIGNMENT_BYTES = 16

# The matrices of consecutive slots, in one or more tensors: what is used where it lives, and what was fetched.
Stacks = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Groups:
    """How many consecutive rows belong to each slot, on the host and as end offsets on the device.

    Args:
        counts: Rows of each slot; sums to A.
        ends: int32 ``[S]``, cumulative counts on the rows' device.
        slot: int64 ``[A]``, each row's slot.
    """

    counts: list[int]
    ends: torch.Tensor
    slot: torch.Tensor
    _split: dict[tuple[int, ...], list[tuple[int, int, Groups]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Groups:
        """Groups with ``counts`` rows each."""
        sizes = torch.tensor(counts, dtype=torch.int64).to(device, non_blocking=True)
        slot = torch.arange(len(counts), device=device).repeat_interleave(sizes, output_size=sum(counts))
        return cls(counts, sizes.cumsum(0).to(torch.int32), slot)

    def split(self, sizes: tuple[int, ...]) -> list[tuple[int, int, Groups]]:
        """The groups of consecutive runs of ``sizes`` slots, each with its first row and one past its last."""
        if sizes not in self._split:
            self._split[sizes] = list(self._runs(sizes))
        return self._split[sizes]

    def _runs(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, Groups]]:
        slots, rows = 0, 0
        for size in sizes:
            counts = self.counts[slots : slots + size]
            stop = rows + sum(counts)
            yield rows, stop, Groups(counts, self.ends[slots : slots + size] - rows, self.slot[rows:stop] - slots)
            slots, rows = slots + size, stop


def rows_times(rows: torch.Tensor, stacks: Stacks, groups: Groups) -> torch.Tensor:
    """Each row times its slot's matrix.

    Args:
        rows: ``[A, k]``.
        stacks: The slots' matrices, ``[S', k, n]`` each, maybe transposed views; together S.
        groups: Rows per slot.

    Returns:
        ``[A, n]`` in the rows' dtype.
    """
    parts = [
        _rows_times(rows[start:stop], stack, own)
        for stack, (start, stop, own) in zip(stacks, groups.split(_sizes(stacks)), strict=True)
        if stop > start
    ]
    if not parts:
        return rows.new_empty(0, stacks[0].shape[2])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows_times(rows: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    if _kernel_takes(rows, weight):
        return torch.nn.functional.grouped_mm(rows, weight, offs=groups.ends)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for slot, (start, stop) in enumerate(_ranges(groups.counts)):
        if stop > start:
            torch.mm(rows[start:stop], weight[slot], out=out[start:stop])
    return out


def rows_outer(left: torch.Tensor, right: torch.Tensor, groups: Groups, sizes: tuple[int, ...]) -> Stacks:
    """The weight gradient: per slot, ``left`` transposed times ``right`` over the slot's rows.

    Args:
        left: ``[A, m]``.
        right: ``[A, n]``.
        groups: Rows per slot.
        sizes: Slots of each stack of the result.

    Returns:
        ``[S', m, n]`` each; zero where a slot has no rows.
    """
    return tuple(_rows_outer(left[start:stop], right[start:stop], own) for start, stop, own in groups.split(sizes))


def _rows_outer(left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
    if _kernel_takes(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=groups.ends)
    out = left.new_zeros(len(groups.counts), left.shape[1], right.shape[1])
    for slot, (start, stop) in enumerate(_ranges(groups.counts)):
        if stop > start:
            torch.mm(left[start:stop].t(), right[start:stop], out=out[slot])
    return out


def _sizes(stacks: Stacks) -> tuple[int, ...]:
    return tuple(len(stack) for stack in stacks)


def group_sums(rows: torch.Tensor, groups: Groups, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The bias gradient: per slot, the weighted sum of its rows.

    Args:
        rows: ``[A, n]``.
        groups: Rows per slot.
        weights: float32 ``[A]``, or ``None`` for ones.

    Returns:
        ``[S, n]`` in the rows' dtype, accumulated in float32.
    """
    member = rows.new_zeros(len(rows), len(groups.counts))
    factors = rows.new_ones(len(rows), 1) if weights is None else weights.to(rows.dtype).unsqueeze(1)
    # A product with a membership matrix: one kernel for all slots, always in the same order.
    return member.scatter_(1, groups.slot.unsqueeze(1), factors).t() @ rows


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for count in counts:
        ranges.append((start, start + count))
        start += count
    return ranges


def _kernel_takes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """``grouped_mm`` fails for zero rows, for other dtypes, and for rows that are not multiples of 16 bytes."""
    return (
        left.is_cuda
        and left.dtype == torch.bfloat16
        and left.shape[0] > 0
        and right.shape[0] > 0
        and all(size * left.element_size() % _ALIGNMENT_BYTES == 0 for size in (*left.shape[1:], *right.shape[1:]))
    )
