"""Copies and sums of many blocks in one launch each; the references are in :mod:`hf_laer.compute.segments`.

The host names the blocks by their addresses, in a table of int64: a row is for consecutive elements of one block, at
most ``LONGEST`` of them, so that all rows are about as much work. Its first column is their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels.launch import launch
from hf_laer.compute.segments import Blocks, Part, copy_some

LONGEST = 1 << 20
_BLOCK, _STEPS, _WARPS = 4096, 2, 8
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _aligned(value, ALIGNED: tl.constexpr):
    """Tells the compiler, which else moves one element at a time."""
    if ALIGNED:
        value = tl.multiple_of(value, 16)
    return value


@triton.jit
def _copy_kernel(
    table, TARGET: tl.constexpr, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * 3
    size = _aligned(tl.load(row), ALIGNED)
    target = _aligned(tl.load(row + 1), ALIGNED).to(tl.pointer_type(TARGET))
    source = _aligned(tl.load(row + 2), ALIGNED).to(tl.pointer_type(SOURCE))
    for step in range(STEPS):
        at = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size).to(TARGET), mask=at < size)


@triton.jit(do_not_specialize=["columns", "most_own"])  # which change from step to step
def _sum_kernel(
    table, columns, most_own, before, scale, INTO: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    READS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * columns
    size = _aligned(tl.load(row), ALIGNED)
    own, other = tl.load(row + 1), tl.load(row + 2)
    into = _aligned(tl.load(row + 3), ALIGNED).to(tl.pointer_type(INTO))
    for step in range(STEPS):
        at = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        total = tl.zeros([BLOCK], tl.float32)
        for k in range(own):
            source = _aligned(tl.load(row + 4 + k), ALIGNED).to(tl.pointer_type(OWN))
            total += tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        for k in range(other):
            source = _aligned(tl.load(row + 4 + most_own + k), ALIGNED).to(tl.pointer_type(OTHER))
            total += tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        total *= scale
        if READS:
            total += before * tl.load(into + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(into + at, total.to(INTO), mask=inside)


def copy_all(targets: Sequence[Blocks], sources: Sequence[Blocks]) -> None:
    """See the reference. One launch for each pair of dtypes, and one more for what is not aligned to 16 bytes."""
    tables: dict[tuple[torch.dtype, torch.dtype, bool], list[np.ndarray]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if not takes(target.view, [source.view]):
            copy_some(target, source)
        elif len(target.which) and target.numel:
            into, out_of = _addresses(target), _addresses(source)
            table = np.stack([np.full_like(into, target.numel), into, out_of], 1)
            tables[target.tensor.dtype, source.tensor.dtype, _is_aligned(table)].append(table)
    for (into_dtype, of_dtype, aligned), some in tables.items():
        table = _cut(np.concatenate(some), [0, into_dtype.itemsize, of_dtype.itemsize])
        constants = _DTYPES[into_dtype], _DTYPES[of_dtype], aligned, _BLOCK, _STEPS
        there = _on(table, targets[0].tensor.device)
        launch(_copy_kernel, _grid(table), (there,), (), constants, num_warps=_WARPS)


def add_parts(into: torch.Tensor, parts: Sequence[Part], before: float, scale: float) -> None:
    """See the reference. One launch; a slice that no part reaches is left alone where its factor is 1."""
    dtypes = list(dict.fromkeys(part.blocks.tensor.dtype for part in parts)) or [into.dtype]
    columns = [_by_slice(len(into), [part for part in parts if part.blocks.tensor.dtype == one]) for one in dtypes]
    own, other = (*columns, _by_slice(len(into), []))[:2]
    here = _addresses(Blocks.whole(into.unsqueeze(1)))
    counts = [(addresses != 0).sum(1) for addresses in (own, other)]
    table = np.column_stack([np.full_like(here, into[:1].numel()), *counts, here, own, other])
    table = table if before != 1 else table[(counts[0] + counts[1]) > 0]
    if table.size == 0 or table[0, 0] == 0:
        return
    aligned = _is_aligned(np.delete(table, [1, 2], 1))
    steps = [dtype.itemsize for dtype in (dtypes[0], dtypes[-1])]
    widths = own.shape[1], other.shape[1]
    table = _cut(table, [0, 0, 0, into.itemsize, *[steps[0]] * widths[0], *[steps[1]] * widths[1]])
    kinds = _DTYPES[into.dtype], _DTYPES[dtypes[0]], _DTYPES[dtypes[-1]]
    numbers, constants = (table.shape[1], widths[0], float(before), float(scale)), (before != 0, aligned)
    tables = (_on(table, into.device),)
    launch(_sum_kernel, _grid(table), tables, numbers, (*kinds, *constants, _BLOCK, _STEPS), num_warps=_WARPS)


def takes(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels can: one device, at most two dtypes of sources, slices (along dimension 0) without gaps."""
    return len({source.dtype for source in sources}) <= 2 and all(
        one.device == target.device and one.dtype in _DTYPES and one[:1].is_contiguous() for one in (target, *sources)
    )


def _addresses(blocks: Blocks) -> np.ndarray:
    """int64 ``[b]``."""
    tensor = blocks.tensor
    step, start = tensor.stride(0) * tensor.itemsize, blocks.rows.start * tensor.stride(1) * tensor.itemsize
    return blocks.which * step + (tensor.data_ptr() + start)


def _by_slice(slices: int, parts: Sequence[Part]) -> np.ndarray:
    """int64 ``[slices, most]``: the addresses of each one's addends, in order; then 0."""
    counts, columns = np.zeros(slices, np.int64), np.zeros((slices, len(parts)), np.int64)
    for at, blocks in parts:
        columns[at, counts[at]] = _addresses(blocks)
        counts[at] += 1
    return columns[:, : counts.max(initial=0)]


def _is_aligned(table: np.ndarray) -> bool:
    """Sizes and addresses."""
    return bool((table & 15 == 0).all())


def _cut(table: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Rows of at most ``LONGEST`` elements; each column grows by ``steps`` bytes with each element."""
    pieces = -(-table[:, 0] // LONGEST)
    rows = np.repeat(table, pieces, axis=0)
    done = (np.arange(len(rows)) - np.repeat(pieces.cumsum() - pieces, pieces)) * LONGEST
    rows += done[:, None] * np.array(steps, np.int64)
    rows[:, 0] = np.minimum(rows[:, 0] - done, LONGEST)
    return rows


def _grid(table: np.ndarray) -> tuple[int, int]:
    return len(table), triton.cdiv(int(table[:, 0].max()), _BLOCK * _STEPS)


def _on(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table).to(device, non_blocking=True)
