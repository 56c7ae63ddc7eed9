"""Homes: each expert parameter is a DTensor on the FSDP mesh, whole experts (dim 0) or slices of all (dim 1).

The parameter ``[E, D, …]`` of rank r is the block ``experts[r]`` times ``rows[r]`` by DTensor's chunk rule; a rank
may own nothing. The exchange needs only these two ranges, so one code serves both kinds of home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hf_laer.compute.segments import Part, add_parts


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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Tables are looked up by it, several times in a step; it grows with the ranks.
        return hash((self.shape, self.experts, self.rows))

    @cached_property
    def is_whole(self) -> bool:
        """Whether no expert is cut."""
        return all(len(rows) == self.shape[1] for rows in self.rows)

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
        if torch.is_grad_enabled():
            # Seldom: a layer runs without.
            with torch.no_grad():
                return self.local
        # Detaching the block, not the DTensor, whose operations cost the host far more.
        data = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        return data.detach()

    def accumulate(self, parts: list[Part], scale: float) -> None:
        """Adds gradients of this rank's block into ``.grad``.

        Sums are made in float32, rounded once where the parameter is narrower.

        Args:
            parts: Gradients of its experts; the caller has no more use for them.
            scale: Their factor.
        """
        if self.parameter.grad is None:
            into, parts, before = self._first(parts, scale)
            self.parameter.grad = self._wrap(into)
        else:
            grad, before = self.parameter.grad, 1.0
            into = grad.to_local() if isinstance(grad, DTensor) else grad
        add_parts(into, parts, before, scale)

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

    def _first(self, parts: list[Part], scale: float) -> tuple[torch.Tensor, list[Part], float]:
        """Where a new gradient is made, what is to be added, and the factor of what is there: the first part, maybe."""
        local = self.local
        if parts and parts[0].is_whole:
            block = parts[0].blocks.tensor
            alone = block.untyped_storage().nbytes() == block.nbytes
            if (block.shape, block.dtype, block.device) == (local.shape, local.dtype, local.device) and alone:
                return block, parts[1:], scale
        return torch.empty_like(local), parts, 0.0

    def _wrap(self, block: torch.Tensor) -> torch.Tensor:
        return _dtensor(block, self.parameter._spec) if isinstance(self.parameter, DTensor) else block


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
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(layout.shape), stride, block.dtype))
    return Home(nn.Parameter(_dtensor(block, spec), requires_grad=requires_grad), layout)


def _dtensor(block: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """As FSDP2 makes its own: ``from_local`` would move an offloaded block to the mesh's device, and takes 45 us."""
    return DTensor(block, spec, requires_grad=False)
