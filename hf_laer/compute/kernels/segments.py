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

from hf_laer.compute.kernels.launch import cdiv, launch
from hf_laer.compute.segments import Blocks, Part, copy_some
from hf_laer.plan.addresses import copy_rows, sum_rows

LONGEST = 1 << 20
_BLOCK, _STEPS, _WARPS = 2048, 2, 8
_NONE = np.zeros(0, np.int64)
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _aligned(value, ALIGNED: tl.constexpr):
    """Tells the compiler, which else moves one element at a time."""
    if ALIGNED:
        value = tl.multiple_of(value, 16)
    return value


@triton.jit
def _at(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Consecutive elements behind an address; what Triton 3.6 knows by the number others must be told of each block."""
    found = _aligned(address, ALIGNED).to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        found = tl.max_contiguous(tl.multiple_of(found, 16), BLOCK)
    return found


@triton.jit
def _inside(at, size, ALIGNED: tl.constexpr):
    """Which elements are within a size; where it is aligned, so many neighbours alike."""
    inside = at < size
    if ALIGNED:
        inside = tl.max_constancy(inside, 16)
    return inside


@triton.jit
def _copy_kernel(
    table, TARGET: tl.constexpr, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * 3
    size, target, source = _aligned(tl.load(row), ALIGNED), tl.load(row + 1), tl.load(row + 2)
    for step in range(STEPS):
        at = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = _inside(at, size, ALIGNED)
        value = tl.load(_at(source, at, SOURCE, ALIGNED, BLOCK), mask=inside)
        tl.store(_at(target, at, TARGET, ALIGNED, BLOCK), value.to(TARGET), mask=inside)


@triton.jit(do_not_specialize=["columns", "most_own"])  # which change from step to step
def _sum_kernel(
    table, columns, most_own, before, scale, INTO: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    READS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * columns
    size = _aligned(tl.load(row), ALIGNED)
    own, other, into = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    for step in range(STEPS):
        at = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = _inside(at, size, ALIGNED)
        total = tl.zeros([BLOCK], tl.float32)
        for k in range(own):
            source = _at(tl.load(row + 4 + k), at, OWN, ALIGNED, BLOCK)
            total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        for k in range(other):
            source = _at(tl.load(row + 4 + most_own + k), at, OTHER, ALIGNED, BLOCK)
            total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        total *= scale
        target = _at(into, at, INTO, ALIGNED, BLOCK)
        if READS:
            total += before * tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(INTO), mask=inside)


def copy_all(targets: Sequence[Blocks], sources: Sequence[Blocks]) -> None:
    """See the reference. One launch for each pair of dtypes, and one more for what is not aligned to 16 bytes."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Blocks, Blocks]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if not len(target.which) or not target.numel:
            continue
        here = target.tensor.device
        if _within(target.tensor, here, target.rows) and _within(source.tensor, here, source.rows):
            alike[target.tensor.dtype, source.tensor.dtype].append((target, source))
        else:
            copy_some(target, source)
    for kinds, pairs in alike.items():
        _copy(*kinds, pairs)


def _copy(into: torch.dtype, of: torch.dtype, pairs: list[tuple[Blocks, Blocks]]) -> None:
    """Targets and sources of these dtypes."""
    numbers = [(len(one.which), one.numel, *_place(one), *_place(other)) for one, other in pairs]
    slices, of_slices = (_joined([pair[side].which for pair in pairs]) for side in (0, 1))
    told = np.array(numbers, np.int64), slices, of_slices
    table, aligned, most = copy_rows(*told, into.itemsize, of.itemsize, LONGEST)
    blocks = cdiv(most, _BLOCK * _STEPS)
    for rows, is_aligned in ((table[:aligned], True), (table[aligned:], False)):
        if len(rows):
            there = _on(rows, pairs[0][0].tensor.device)
            constants = _DTYPES[into], _DTYPES[of], is_aligned, _BLOCK, _STEPS
            launch(_copy_kernel, (len(rows), blocks), (there,), (), constants, num_warps=_WARPS)


def add_parts(into: torch.Tensor, parts: Sequence[Part], before: float, scale: float) -> None:
    """See the reference. One launch; a slice that no part reaches is left alone where its factor is 1."""
    if not into.numel():
        return
    parts = [part for part in parts if len(part.at)]
    dtypes = list(dict.fromkeys(part.blocks.tensor.dtype for part in parts)) or [into.dtype]
    numbers = [(len(p.at), dtypes.index(p.blocks.tensor.dtype), *_place(p.blocks)) for p in parts]
    at, which = (_joined(some) for some in ([p.at for p in parts], [p.blocks.which for p in parts]))
    kinds = into.dtype, dtypes[0], dtypes[-1]
    slices = np.array((len(into), into.shape[1:].numel(), into.data_ptr(), into.stride(0) * into.itemsize), np.int64)
    sizes = np.array([kind.itemsize for kind in kinds], np.int64)
    of_parts = np.array(numbers, np.int64).reshape(-1, 4)
    table, own, aligned = sum_rows(slices, of_parts, at, which, sizes, LONGEST, before != 1)
    if not len(table):
        return
    grid = len(table), cdiv(min(int(slices[1]), LONGEST), _BLOCK * _STEPS)
    told = table.shape[1], int(own), float(before), float(scale)
    constants = *(_DTYPES[kind] for kind in kinds), before != 0, bool(aligned), _BLOCK, _STEPS
    launch(_sum_kernel, grid, (_on(table, into.device),), told, constants, num_warps=_WARPS)


def takes(into: torch.Tensor, parts: Sequence[Part]) -> bool:
    """Whether :func:`add_parts` can: one device, at most two dtypes of parts, slices without gaps."""
    blocks, here = [part.blocks for part in parts], into.device
    few = len({one.tensor.dtype for one in blocks}) <= 2
    return few and _within(into, here) and all(_within(one.tensor, here, one.rows) for one in blocks)


def _within(tensor: torch.Tensor, device: torch.device, rows: range | None = None) -> bool:
    """Whether the kernels can address its slices, or these rows of each: of a dtype they know, there, without gaps."""
    if tensor.device != device or tensor.dtype not in _DTYPES:
        return False
    if tensor.is_contiguous():
        return True
    return (tensor[:1] if rows is None else tensor[:1, rows.start : rows.stop]).is_contiguous()


def _place(blocks: Blocks) -> tuple[int, int]:
    """The address of the rows of a tensor's first slice, and the bytes from one slice to the next."""
    tensor, start = blocks.tensor, blocks.rows.start
    address = tensor.data_ptr() + (start * tensor.stride(1) * tensor.itemsize if start else 0)
    return address, tensor.stride(0) * tensor.itemsize


def _joined(some: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(some) if some else _NONE


def _on(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table).to(device, non_blocking=True)
