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
        data = self.parameter.detach()
        return data.to_local() if isinstance(data, DTensor) else data

    def accumulate(self, block: torch.Tensor, scale: float) -> None:
        """Adds this rank's block of the gradient into ``.grad``, then runs the parameter's post-accumulate hooks.

        Args:
            block: The shape of :attr:`local`; the caller has no more use for it.
            scale: Its factor.
        """
        parameter = self.parameter
        block = block.to(self.local.device)
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.add_(block, alpha=scale)
        elif block.dtype == parameter.dtype and block.untyped_storage().nbytes() == block.nbytes:
            parameter.grad = self._wrap(block.mul_(scale))
        else:
            # A factor with a dimension, so that the product is formed in float32, in one pass.
            factor = torch.full((1,), scale, dtype=torch.float32, device=block.device)
            parameter.grad = self._wrap((block * factor).to(parameter.dtype))
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)

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
