"""Many blocks copied, or summed, at once: what weights and gradients on their way to and from messages ask for.

A message holds a piece of every expert and parameter; copied one by one, they cost the host more than the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_laer.compute.kernels import usable

# The first of consecutive blocks (along dimension 0 of what it is added to), and their addends.
Part = tuple[int, torch.Tensor]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, of the same shape and maybe another dtype."""
    if targets and usable(targets[0]):
        from hf_laer.compute.kernels.segments import copy_all as kernel

        kernel(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def add_parts(into: torch.Tensor, parts: Sequence[Part], before: float, scale: float) -> None:
    """``before * into + scale * (the sum of parts)``, block by block, summed in float32 and rounded once.

    Args:
        into: ``[B, …]``, changed in place; not read where ``before`` is 0.
        parts: Each ``[b, …]``; blocks that none reaches only get the factor.
        before: Factor of what is there.
        scale: Factor of the parts.
    """
    if usable(into):
        from hf_laer.compute.kernels import segments

        if segments.takes(into, [part for _, part in parts]):
            segments.add_parts(into, parts, before, scale)
            return
    total = into if into.dtype in (torch.float32, torch.float64) else into.float()
    if before == 0:
        total.zero_()
    elif before != 1:
        total.mul_(before)
    for start, part in parts:
        total[start : start + len(part)].add_(part.to(total.device), alpha=scale)
    if total is not into:
        into.copy_(total)
