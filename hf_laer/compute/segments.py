"""Many blocks copied, or summed, at once: what weights and gradients on their way to and from messages ask for.

A message holds a piece of every expert and parameter; copied one by one, they cost the host more than the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.compute.kernels import usable


@lru_cache(maxsize=256)
def _every(slices: int) -> np.ndarray:
    """int64 ``[slices]``, ascending; shared, so that nobody may write to it."""
    every = np.arange(slices)
    every.flags.writeable = False
    return every


class Blocks(NamedTuple):
    """Some of a tensor's slices, and of each some rows.

    Args:
        tensor: ``[X, D, …]``.
        which: int64 ``[b]``, the slices, none twice.
        rows: Of the D.
    """

    tensor: torch.Tensor
    which: np.ndarray
    rows: range

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Blocks:
        """All of a tensor."""
        slices, rows = tensor.shape[:2]
        return cls(tensor, _every(slices), range(rows))

    @property
    def view(self) -> torch.Tensor:
        """The rows of all slices."""
        return self.tensor[:, self.rows.start : self.rows.stop]

    @property
    def on_device(self) -> torch.Tensor:
        """The index where the tensor is."""
        return torch.tensor(self.which, device=self.tensor.device)

    @property
    def values(self) -> torch.Tensor:
        """A copy, ``[b, rows, …]``."""
        return self.view[self.on_device]

    @property
    def numel(self) -> int:
        """Elements of one block."""
        return len(self.rows) * self.tensor.shape[2:].numel()


class Part(NamedTuple):
    """Addends.

    Args:
        at: int64 ``[b]``, what each is added to.
        blocks: As many.
    """

    at: np.ndarray
    blocks: Blocks

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Part:
        """An addend for each slice."""
        blocks = Blocks.whole(tensor)
        return cls(blocks.which, blocks)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor has one addend for each slice, in order."""
        (tensor, which, rows), every = self.blocks, _every(self.blocks.tensor.shape[0])
        in_order = all(some is every or np.array_equal(some, every) for some in (self.at, which))
        return in_order and rows == range(tensor.shape[1])


def copy_all(targets: Sequence[Blocks], sources: Sequence[Blocks]) -> None:
    """Copies sources to targets, block by block, of the same shape and maybe another dtype."""
    if targets and usable(targets[0].tensor):
        from hf_laer.compute.kernels.segments import copy_all as kernel

        kernel(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            copy_some(target, source)


def copy_some(target: Blocks, source: Blocks) -> None:
    """One pair of :func:`copy_all`."""
    if len(target.which):
        values = source.values.to(target.tensor.device, target.tensor.dtype)
        target.view.index_copy_(0, target.on_device, values)


def add_parts(into: torch.Tensor, parts: Sequence[Part], before: float, scale: float) -> None:
    """``before * into + scale * (the sum of parts)``, slice by slice, summed in float32 and rounded once.

    Args:
        into: ``[X, …]``, changed in place; not read where ``before`` is 0.
        parts: Addends of its slices; one that has none only gets the factor.
        before: Factor of what is there.
        scale: Factor of the parts.
    """
    if before == 1 and not parts:
        return
    if usable(into):
        from hf_laer.compute.kernels import segments

        if segments.takes(into, parts):
            segments.add_parts(into, parts, before, scale)
            return
    total = into if into.dtype in (torch.float32, torch.float64) else into.float()
    if before == 0:
        total.zero_()
    elif before != 1:
        total.mul_(before)
    for at, blocks in parts:
        for place, value in zip(at.tolist(), blocks.values.to(total.device, total.dtype), strict=True):
            total[place].add_(value, alpha=scale)
    if total is not into:
        into.copy_(total)
