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

LONGEST = 1 << 20
_BLOCK, _STEPS, _WARPS = 4096, 2, 8
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Part = tuple[int, torch.Tensor]


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


@triton.jit
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


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """See the reference. One launch for each pair of dtypes, and one more for what is not aligned to 16 bytes."""
    rows: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if not takes(target, [source]):
            target.copy_(source)
            continue
        for size, into, out_of in _pairs(target, source):
            rows[target.dtype, source.dtype, (size | into | out_of) & 15 == 0].append((size, into, out_of))
    for (into_dtype, of_dtype, aligned), some in rows.items():
        table = _cut(np.array(some, np.int64), [0, into_dtype.itemsize, of_dtype.itemsize])
        _copy_kernel[_grid(table)](
            _on(table, targets[0].device),
            _DTYPES[into_dtype],
            _DTYPES[of_dtype],
            aligned,
            _BLOCK,
            _STEPS,
            num_warps=_WARPS,
        )


def add_parts(into: torch.Tensor, parts: Sequence[Part], before: float, scale: float) -> None:
    """See the reference. One launch; a block that no part reaches is left alone where its factor is 1."""
    own_dtype = parts[0][1].dtype if parts else into.dtype
    own: list[list[int]] = [[] for _ in into]
    other: list[list[int]] = [[] for _ in into]
    for start, part in parts:
        kind = own if part.dtype == own_dtype else other
        for at, address in enumerate(_addresses(part), start):
            kind[at].append(address)
    most, most_other = max(map(len, own), default=0), max(map(len, other), default=0)
    size = into[:1].numel()
    rows = [
        (size, len(a), len(b), address, *a, *[0] * (most - len(a)), *b, *[0] * (most_other - len(b)))
        for a, b, address in zip(own, other, _addresses(into), strict=True)
        if a or b or before != 1
    ]
    if not rows or size == 0:
        return
    table = np.array(rows, np.int64)
    aligned = int(np.bitwise_or.reduce(np.delete(table, [1, 2], 1), axis=None)) & 15 == 0
    other_dtype = next((part.dtype for _, part in parts if part.dtype != own_dtype), own_dtype)
    steps = [0, 0, 0, into.itemsize, *[own_dtype.itemsize] * most, *[other_dtype.itemsize] * most_other]
    table = _cut(table, steps)
    _sum_kernel[_grid(table)](
        _on(table, into.device), table.shape[1], most, float(before), float(scale), _DTYPES[into.dtype],
        _DTYPES[own_dtype], _DTYPES[other_dtype], before != 0, aligned, _BLOCK, _STEPS,
        num_warps=_WARPS,
    )  # fmt: skip


def takes(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels can: one device, at most two dtypes of sources, blocks (along dimension 0) without gaps."""
    return len({source.dtype for source in sources}) <= 2 and all(
        one.device == target.device and one.dtype in _DTYPES and one[:1].is_contiguous() for one in (target, *sources)
    )


def _pairs(target: torch.Tensor, source: torch.Tensor) -> list[tuple[int, int, int]]:
    """Size and the two addresses of each block, or of all in one where neither has gaps between them."""
    if target.numel() == 0:
        return []
    if target.is_contiguous() and source.is_contiguous():
        return [(target.numel(), target.data_ptr(), source.data_ptr())]
    size = target.numel() // len(target)
    return [(size, *pair) for pair in zip(_addresses(target), _addresses(source), strict=True)]


def _addresses(tensor: torch.Tensor) -> range:
    """Of each of its blocks."""
    step = tensor.stride(0) * tensor.itemsize
    start = tensor.data_ptr()
    return range(start, start + len(tensor) * step, step) if len(tensor) else range(0)


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
