"""Products of rows grouped by slot: the fast kernel where it applies, a loop over groups elsewhere.

Letters in shapes: A rows sorted by slot, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_ALIGNMENT_BYTES = 16
# A product of this size keeps an H100 or H200 busy alone, at 600 to 730 TFLOP/s; among small groups grouped_mm does it
# at 420 to 600 (docs/benchmarks.md).
_ALONE_FLOPS = 100 * 10**9

# The matrices of consecutive slots, in one or more tensors: what is used where it lives, and what was fetched.
Stacks = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Apart:
    """Groups told apart by their size.

    Args:
        alone: Slot, first row and one past the last of each group that is multiplied alone.
        together: First row and one past the last of each run of the others.
        ends: int32 ``[S]``, cumulative counts of the others' rows; none for those alone.
    """

    alone: list[tuple[int, int, int]]
    together: list[tuple[int, int]]
    ends: torch.Tensor

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The others' rows, one after the other."""
        parts = [rows[start:stop] for start, stop in self.together]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sizes(self) -> list[int]:
        """Rows of each run."""
        return [stop - start for start, stop in self.together]


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
    _apart: dict[int, Apart] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Groups:
        """Groups with ``counts`` rows each."""
        sizes = torch.tensor(counts, dtype=torch.int64)
        slot = torch.arange(len(counts)).repeat_interleave(sizes).to(device)
        return cls(counts, sizes.cumsum(0).to(torch.int32).to(device, non_blocking=True), slot)

    def split(self, sizes: tuple[int, ...]) -> list[tuple[int, int, Groups]]:
        """The groups of consecutive runs of ``sizes`` slots, each with its first row and one past its last."""
        if sizes not in self._split:
            self._split[sizes] = list(self._runs(sizes))
        return self._split[sizes]

    def apart(self, least: int) -> Apart:
        """Groups of at least ``least`` rows, and the others."""
        if least not in self._apart:
            self._apart[least] = self._told_apart(least)
        return self._apart[least]

    def _told_apart(self, least: int) -> Apart:
        alone: list[tuple[int, int, int]] = []
        together: list[tuple[int, int]] = []
        start = 0
        for slot, count in enumerate(self.counts):
            stop = start + count
            if count >= least:
                alone.append((slot, start, stop))
            elif count and together and together[-1][1] == start:
                together[-1] = together[-1][0], stop
            elif count:
                together.append((start, stop))
            start = stop
        ends = self.ends
        if alone and together:
            sizes = torch.tensor([0 if count >= least else count for count in self.counts])
            ends = sizes.cumsum(0).to(torch.int32).to(ends.device, non_blocking=True)
        return Apart(alone, together, ends)

    def _runs(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, Groups]]:
        slots, rows = 0, 0
        for size in sizes:
            counts = self.counts[slots : slots + size]
            stop = rows + sum(counts)
            ends, slot = self.ends[slots : slots + size], self.slot[rows:stop]
            yield rows, stop, Groups(counts, ends - rows if rows else ends, slot - slots if slots else slot)
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
    parts = [(stack, *part) for stack, part in zip(stacks, groups.split(_sizes(stacks)), strict=True)]
    busy = [part for part in parts if part[1] < part[2]]
    if len(busy) == 1:
        stack, _, _, own = busy[0]
        return _rows_times(rows, stack, own)
    out = rows.new_empty(len(rows), stacks[0].shape[2])
    for stack, start, stop, own in busy:
        _rows_times(rows[start:stop], stack, own, out[start:stop])
    return out


def _rows_times(
    rows: torch.Tensor, weight: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    apart = groups.apart(_alone_from(rows, weight, weight.shape[1] * weight.shape[2]))
    if out is None:
        if not apart.alone and apart.together:
            return torch.nn.functional.grouped_mm(rows, weight, offs=apart.ends)
        out = rows.new_empty(len(rows), weight.shape[2])
    for slot, start, stop in apart.alone:
        torch.mm(rows[start:stop], weight[slot], out=out[start:stop])
    if apart.together:
        found = torch.nn.functional.grouped_mm(apart.of(rows), weight, offs=apart.ends)
        for (start, stop), part in zip(apart.together, found.split(apart.sizes()), strict=True):
            out[start:stop].copy_(part)
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
    apart = groups.apart(_alone_from(left, right, left.shape[1] * right.shape[1]))
    if apart.together:
        # Zero where a group has no rows here, as grouped_mm leaves it.
        out = torch.nn.functional.grouped_mm(apart.of(left).t(), apart.of(right), offs=apart.ends)
    else:
        out = left.new_zeros(len(groups.counts), left.shape[1], right.shape[1])
    for slot, start, stop in apart.alone:
        torch.mm(left[start:stop].t(), right[start:stop], out=out[slot])
    return out


def _alone_from(left: torch.Tensor, right: torch.Tensor, matrix: int) -> int:
    """From how many rows on a group's product is a call of its own; each one where the kernel does not apply."""
    return -(-_ALONE_FLOPS // (2 * matrix)) if _kernel_takes(left, right) else 1


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


def _kernel_takes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """``grouped_mm`` fails for zero rows, for other dtypes, and for rows that are not multiples of 16 bytes."""
    return (
        left.is_cuda
        and left.dtype == torch.bfloat16
        and left.shape[0] > 0
        and right.shape[0] > 0
        and all(size * left.element_size() % _ALIGNMENT_BYTES == 0 for size in (*left.shape[1:], *right.shape[1:]))
    )
