"""Homes: each expert parameter is a DTensor on the FSDP mesh, whole experts (dim 0) or slices of all (dim 1).

The parameter ``[E, D, …]`` of rank r is the block ``experts[r]`` times ``rows[r]`` by DTensor's chunk rule; a rank
may own nothing. The exchange needs only these two ranges, so one code serves both kinds of home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

Part = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """The blocks of one parameter on the ranks of the shard dimension.

    Args:
        shape: Global shape ``(E, D, …)``.
        experts: Per rank, the experts (dim 0) of its block.
        rows: Per rank, the rows (dim 1) of its block.
    """

    shape: tuple[int, ...]
    experts: tuple[range, ...]
    rows: tuple[range, ...]

    @classmethod
    def sharded(cls, shape: tuple[int, ...], dim: int, ranks: int) -> Layout:
        """Blocks of a parameter that is chunked along ``dim`` (0 or 1)."""
        cut, whole = chunks(shape[dim], ranks), (range(shape[1 - dim]),) * ranks
        return cls(tuple(shape), *((cut, whole) if dim == 0 else (whole, cut)))

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the block of ``rank``."""
        return (len(self.experts[rank]), len(self.rows[rank]), *self.shape[2:])

    def block(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """A view of the block of ``rank`` in the full tensor."""
        experts, rows = self.experts[rank], self.rows[rank]
        return full[experts.start : experts.stop, rows.start : rows.stop]


def chunks(size: int, parts: int) -> tuple[range, ...]:
    """``torch.chunk``'s rule: equal chunks, rounded up, the last ones shorter or empty."""
    step = math.ceil(size / parts)
    return tuple(range(min(i * step, size), min((i + 1) * step, size)) for i in range(parts))


@dataclass(frozen=True)
class Home:
    """One expert parameter and where its blocks are.

    Args:
        parameter: The module's parameter: a DTensor, or a plain tensor in a group of one rank.
        layout: Its blocks.
    """

    parameter: nn.Parameter
    layout: Layout

    @property
    def local(self) -> torch.Tensor:
        """This rank's block, ``[E', D', …]``, without gradient."""
        with torch.no_grad():
            # Detaching the block, not the DTensor, whose operations cost the host far more.
            data = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
            return data.detach()

    def accumulate(self, parts: list[Part], scale: float) -> None:
        """Adds gradients of this rank's block into ``.grad``.

        Sums are made in float32, rounded once where the parameter is narrower.

        Args:
            parts: First experts in the block, and their gradients; the caller has no more use for them.
            scale: Their factor.
        """
        parameter, local = self.parameter, self.local
        if parameter.dtype != torch.float32 and len(parts) > 1:
            # Scaled before it is rounded: a sum may overflow where its mean does not.
            parts, scale = [(0, _mean(parts, local.shape, scale))], 1.0
        if parameter.grad is None:
            parts, grad = self._first(parts, scale, local)
            parameter.grad = self._wrap(grad)
        else:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for start, part in parts:
            grad[start : start + len(part)].add_(part.to(grad.device), alpha=scale)

    def run_hooks(self) -> None:
        """Runs the parameter's post-accumulate hooks, once the backward has added all there is.

        Raises:
            RuntimeError: It has a hook on the gradient itself, which nothing here would call.
        """
        parameter = self.parameter
        if parameter._backward_hooks:
            raise RuntimeError(
                "an expert parameter has a gradient hook (register_hook), which expert parallelism cannot call: use "
                "register_post_accumulate_grad_hook"
            )
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)

    @staticmethod
    def _first(parts: list[Part], scale: float, like: torch.Tensor) -> tuple[list[Part], torch.Tensor]:
        """A new gradient, and what is still to be added to it."""
        if not parts or parts[0][1].shape != like.shape:
            return parts, torch.zeros_like(like)
        block = parts[0][1].to(like.device)
        if block.dtype == like.dtype and block.untyped_storage().nbytes() == block.nbytes:
            return parts[1:], block if scale == 1 else block.mul_(scale)
        if scale == 1:
            return parts[1:], block.to(like.dtype, copy=True)
        # A factor with a dimension, so that the product is formed in float32, in one pass.
        factor = torch.full((1,), scale, dtype=torch.float32, device=block.device)
        return parts[1:], (block * factor).to(like.dtype)

    def _wrap(self, block: torch.Tensor) -> torch.Tensor:
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return block
        return DTensor.from_local(
            block,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _mean(parts: list[Part], shape: torch.Size, scale: float) -> torch.Tensor:
    """Scaled sum of parts of a block, made in float32; in place where the first one is the whole block."""
    start, first = parts[0]
    if first.shape != shape:
        total = torch.zeros(shape, dtype=torch.float32, device=first.device)
        for start, part in parts:
            total[start : start + len(part)] += part
        return total if scale == 1 else total.mul_(scale)
    exact: dict[int, torch.Tensor] = {}
    for start, part in parts[1:]:
        for at, gradient in enumerate(part.unbind(0), start):
            exact[at] = (exact[at] if at in exact else first[at].float()) + gradient
    if scale != 1:
        first.mul_(scale)
    for at, gradient in exact.items():
        first[at].copy_(gradient.mul_(scale))
    return first


def plain_home(parameter: nn.Parameter) -> Home:
    """The home of an unsharded parameter: one rank owns all of it."""
    return Home(parameter, Layout.sharded(tuple(parameter.shape), 0, 1))


def sharded_home(block: torch.Tensor, layout: Layout, dim: int, mesh: DeviceMesh, requires_grad: bool) -> Home:
    """The home made of this rank's block.

    Args:
        block: This rank's block of the parameter; owned by the home from here on.
        layout: The blocks of all ranks.
        dim: The sharded dimension, 0 or 1.
        mesh: 1-D (shard) or 2-D (replicate, shard); the block is the same on every replica.
        requires_grad: Whether the parameter is trained.
    """
    placements: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1) + (Shard(dim),)
    stride = torch.empty(layout.shape, device="meta").stride()
    tensor = DTensor.from_local(block, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)
    return Home(nn.Parameter(tensor, requires_grad=requires_grad), layout)
