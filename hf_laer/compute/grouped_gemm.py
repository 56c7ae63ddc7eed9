"""Products of rows grouped by slot: the fast kernel where it applies, a loop over groups elsewhere.

Letters in shapes: A rows sorted by slot, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

_ALIGNMENT_BYTES = 16
# A product of this size keeps an H100 or H200 busy alone, at 600 to 730 TFLOP/s; among small groups grouped_mm does it
# at 420 to 600 (docs/benchmarks.md).
_ALONE_FLOPS = 100 * 10**9

# The matrices of consecutive slots, in one or more tensors: what is used where it lives, and what was fetched.
Stacks = tuple[torch.Tensor, ...]


def alone_from(rows: int, columns: int) -> int:
    """From how many rows on a group's product with such a matrix is a call of its own."""
    return -(-_ALONE_FLOPS // (2 * rows * columns))


class Arrangement(NamedTuple):
    """Where the rows of each slot lie: stack after stack, in each one those of large groups last.

    So the others are consecutive and in the order of their slots, as ``grouped_mm`` wants them, and no product needs a
    copy of its rows.

    Args:
        counts: Rows of each slot.
        stacks: Slots of each stack.
        order: All slots, as their rows lie.
        alone: Those whose products are calls of their own; they come last in their stack.
    """

    counts: Sequence[int]
    stacks: tuple[int, ...]
    order: Sequence[int]
    alone: frozenset[int]

    @classmethod
    def of(cls, counts: Sequence[int], stacks: tuple[int, ...], least: int | None) -> Arrangement:
        """Groups of at least ``least`` rows are alone; ``None``: none is."""
        slots = range(len(counts))
        if least is None or max(counts, default=0) < least:
            return cls(counts, stacks, slots, frozenset())
        alone = frozenset(slot for slot in slots if counts[slot] >= least)
        order, start = [], 0
        for size in stacks:
            # Stable: in each half by slot.
            order += sorted(range(start, start + size), key=alone.__contains__)
            start += size
        return cls(counts, stacks, order, alone)

    def places(self) -> np.ndarray:
        """int64 ``[S]``: each slot's place in the order."""
        places = np.arange(len(self.order))
        if self.alone:
            places[self.order] = places.copy()
        return places

    def ends(self) -> np.ndarray:
        """int64 ``[S]``: where each slot's rows end among those of its stack that are multiplied together."""
        together = np.array(self.counts, np.int64)
        if self.alone:
            together[list(self.alone)] = 0
        ends, start = together.cumsum(), 0
        of_stacks = ends.copy() if len(self.stacks) > 1 else ends
        for size in self.stacks[:-1]:
            start += size
            if start:
                of_stacks[start:] = ends[start:] - ends[start - 1]
        return of_stacks


@dataclass(frozen=True, eq=False)
class Stretch:
    """The rows of one stack.

    Args:
        start: The first one.
        together: One past the last of those that are multiplied in one call.
        stop: One past the last.
        ends: int32 ``[S']``, where each slot's rows among these end, counted from ``start``.
        slots: The stack's, as their rows lie, counted in all stacks.
        first: The stack's first.
        counts: Rows of each slot of all stacks.
        many_alone: How many of these slots are multiplied alone; they come last.
    """

    start: int
    together: int
    stop: int
    ends: torch.Tensor
    slots: Sequence[int]
    first: int
    counts: Sequence[int]
    many_alone: int

    @cached_property
    def each(self) -> list[tuple[int, int, int]]:
        """Slot in the stack, first row and one past the last, of every slot that has rows."""
        return self._rows_of(self.slots, self.start)

    @cached_property
    def alone(self) -> list[tuple[int, int, int]]:
        """Of these, the ones that are multiplied alone."""
        return self._rows_of(self.slots[len(self.slots) - self.many_alone :], self.together)

    def _rows_of(self, slots: Sequence[int], start: int) -> list[tuple[int, int, int]]:
        found, stop = [], start
        for slot in slots:
            start, stop = stop, stop + self.counts[slot]
            if start < stop:
                found.append((slot - self.first, start, stop))
        return found


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows belong to which slot, on the host and on the device.

    Args:
        arrangement: How they lie.
        ends: int32 ``[S]``, the arrangement's on the rows' device.
        slot: int64 ``[A]``, each row's slot.
    """

    arrangement: Arrangement
    ends: torch.Tensor
    slot: torch.Tensor
    _stretches: dict[tuple[int, ...], list[Stretch]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        device: torch.device,
        least: int | None = None,
        stacks: tuple[int, ...] | None = None,
    ) -> Groups:
        """Groups with ``counts`` rows each, in one stack unless told otherwise; see :meth:`Arrangement.of`."""
        arrangement = Arrangement.of(counts, stacks or (len(counts),), least)
        sizes = torch.tensor([counts[slot] for slot in arrangement.order], dtype=torch.int64)
        slot = torch.tensor(arrangement.order, dtype=torch.int64).repeat_interleave(sizes).to(device)
        return cls.lying(arrangement, slot)

    @classmethod
    def lying(cls, arrangement: Arrangement, slot: torch.Tensor) -> Groups:
        """Rows that lie so; ``slot`` as above."""
        return cls(arrangement, _on(slot.device, arrangement.ends()), slot)

    @property
    def counts(self) -> Sequence[int]:
        """Rows of each slot; sums to A."""
        return self.arrangement.counts

    def stretches(self, stacks: tuple[int, ...]) -> list[Stretch]:
        """The rows of each of ``stacks``, as many slots each; other ones than the arrangement's if none is alone."""
        if stacks not in self._stretches:
            self._stretches[stacks] = self._cut(stacks)
        return self._stretches[stacks]

    def _cut(self, stacks: tuple[int, ...]) -> list[Stretch]:
        arrangement, ends = self.arrangement, self.ends
        if stacks != arrangement.stacks:
            assert not arrangement.alone, "rows lie as other stacks want them"
            arrangement = arrangement._replace(stacks=stacks)
            ends = _on(ends.device, arrangement.ends())
        found, slots, start, counts = [], 0, 0, arrangement.counts
        for size in stacks:
            each, every = range(slots, slots + size), arrangement.order[slots : slots + size]
            alone = [slot for slot in each if slot in arrangement.alone] if arrangement.alone else []
            stop = start + sum(counts[slots : slots + size])
            together = stop - sum(counts[slot] for slot in alone)
            found.append(Stretch(start, together, stop, ends[slots : slots + size], every, slots, counts, len(alone)))
            slots, start = slots + size, stop
        return found


def rows_times(rows: torch.Tensor, stacks: Stacks, groups: Groups) -> torch.Tensor:
    """Each row times its slot's matrix.

    Args:
        rows: ``[A, k]``.
        stacks: The slots' matrices, ``[S', k, n]`` each, maybe transposed views; together S.
        groups: Rows per slot.

    Returns:
        ``[A, n]`` in the rows' dtype.
    """
    out: torch.Tensor | None = None
    for stack, stretch in zip(stacks, groups.stretches(_sizes(stacks)), strict=True):
        if stretch.start < stretch.stop:
            out = _rows_times(rows, stack, stretch, out)
    return rows.new_empty(len(rows), stacks[0].shape[2]) if out is None else out


def _rows_times(rows: torch.Tensor, weight: torch.Tensor, stretch: Stretch, out: torch.Tensor | None) -> torch.Tensor:
    """Into the stretch's rows of ``out`` ``[A, n]``, or of a new one."""
    kernel, some = _kernel_takes(rows, weight), slice(stretch.start, stretch.together)
    if kernel and stretch.start < stretch.together:
        if out is None and stretch.start == 0:
            # Of all rows, as it takes no place to write to: those after its last group are left to what follows.
            out = torch.nn.functional.grouped_mm(rows, weight, offs=stretch.ends)
        else:
            out = rows.new_empty(rows.shape[0], weight.shape[2]) if out is None else out
            out[some].copy_(torch.nn.functional.grouped_mm(rows[some], weight, offs=stretch.ends))
    out = rows.new_empty(rows.shape[0], weight.shape[2]) if out is None else out
    for slot, start, stop in stretch.alone if kernel else stretch.each:
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
    return tuple(_rows_outer(left, right, stretch) for stretch in groups.stretches(sizes))


def _rows_outer(left: torch.Tensor, right: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    kernel, some = _kernel_takes(left, right), slice(stretch.start, stretch.together)
    if kernel and stretch.start < stretch.together:
        # Zero where a group has no rows here.
        out = torch.nn.functional.grouped_mm(left[some].t(), right[some], offs=stretch.ends)
    else:
        out = left.new_empty(len(stretch.ends), left.shape[1], right.shape[1])
        with_rows = {slot for slot, _, _ in stretch.each}
        for slot in range(len(out)):
            if slot not in with_rows:
                out[slot].zero_()
    for slot, start, stop in stretch.alone if kernel else stretch.each:
        torch.mm(left[start:stop].t(), right[start:stop], out=out[slot])
    return out


def _on(device: torch.device, ends: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ends.astype(np.int32)).to(device, non_blocking=True)


def _sizes(stacks: Stacks) -> tuple[int, ...]:
    return tuple([stack.shape[0] for stack in stacks])


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
