"""What the engine is measured against, over the same routing: plain PyTorch, written for speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_laer.compute.grouped_gemm import Groups, alone_from, rows_outer, rows_times
from hf_laer.config import FSDP2


@dataclass
class BenchWeights:
    """Sizes of the experts, and where they are."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    device: torch.device
    dtype: torch.dtype

    def share(self) -> int:
        """Experts of one rank.

        Raises:
            ValueError: They do not divide over the ranks.
        """
        ranks = dist.get_world_size()
        if self.experts % ranks:
            raise ValueError(f"{self.experts} experts do not divide over {ranks} ranks")
        return self.experts // ranks

    def make(self, experts: int) -> list[torch.Tensor]:
        """Random gate/up ``[experts, 2I, H]`` and down ``[experts, H, I]``."""
        shapes = ((experts, 2 * self.intermediate, self.hidden), (experts, self.hidden, self.intermediate))
        kind: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        return [torch.randn(shape, **kind).mul_(0.02).requires_grad_() for shape in shapes]


@dataclass
class Gathered:
    """What FSDP2 does, without its prefetch: all-gather every expert, compute the own tokens, reduce-scatter."""

    sizes: BenchWeights
    parameters: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = self.sizes.make(self.sizes.share())

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up, down = (_AllGather.apply(weight) for weight in self.parameters)
        return own_tokens(hidden, index, gates, up, down)


@dataclass
class Whole:
    """All experts on every rank, nothing on its way: what FSDP2's layer does beside FSDP2's part."""

    sizes: BenchWeights
    parameters: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = self.sizes.make(self.sizes.experts)

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return own_tokens(hidden, index, gates, *self.parameters)


class _Layer(nn.Module):
    """Own tokens, all experts."""

    def __init__(self, sizes: BenchWeights) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(weight.detach()) for weight in sizes.make(sizes.experts))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return own_tokens(hidden, index, gates, self.up, self.down)


@dataclass
class Sharded:
    """FSDP2 itself over this one layer: nothing before or after it for its prefetch."""

    sizes: BenchWeights
    parameters: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        mesh = init_device_mesh(self.sizes.device.type, (dist.get_world_size(),))
        self._layer = _Layer(self.sizes)
        fully_shard(self._layer, mesh=mesh, reshard_after_forward=True)
        self.parameters = list(self._layer.parameters())

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return self._layer(hidden, index, gates)


@dataclass
class Products:
    """The limit to approach: the layer's matrix products alone, for a balanced share of the rows."""

    sizes: BenchWeights
    parameters: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weights = self.sizes.make(max(1, self.sizes.experts // dist.get_world_size()))
        self._operands: tuple[Any, ...] | None = None

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if self._operands is None:
            self._operands = self._made(index.numel())
        return _Products.apply(hidden, *self._operands)

    def _made(self, count: int) -> tuple[Any, ...]:
        """Once, so that the products are all that is timed."""
        up, down = (weight.detach() for weight in self._weights)
        share = max(1, count // len(up))
        groups = Groups.of([share] * len(up), up.device, alone_from(*up.shape[1:]))
        rows, act = (torch.randn(share * len(up), up.shape[2], dtype=up.dtype, device=up.device) for up in (up, down))
        return groups, rows, rows_times(rows, (up.transpose(1, 2),), groups), act, up, down


def own_tokens(
    hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One rank's tokens ``[T, H]`` through all experts ``[E, 2I, H]`` and ``[E, H, I]``, by grouped products."""
    order = index.reshape(-1).argsort(stable=True)
    counts = torch.bincount(index.reshape(-1), minlength=len(up))
    ends = counts.cumsum(0).to(torch.int32)
    rows = hidden[order // index.shape[1]]
    act = _silu_gate(_grouped(rows, up, ends))
    out = _grouped(act, down, ends) * gates.reshape(-1)[order].unsqueeze(1)
    back = torch.empty_like(out).index_copy(0, order, out)
    return back.view(*index.shape, -1).sum(1)


Rivals = Mapping[str, Callable[[BenchWeights], Any]]
RIVALS: Rivals = {"fsdp_gather": Gathered, FSDP2: Sharded, "gemm": Products}


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        full = shard.new_empty(shard.shape[0] * dist.get_world_size(), *shard.shape[1:])
        dist.all_gather(list(full.chunk(dist.get_world_size())), shard.contiguous())
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        size = dist.get_world_size()
        shard = grad.new_empty(grad.shape[0] // size, *grad.shape[1:])
        dist.reduce_scatter(shard, list(grad.contiguous().chunk(size)))
        return shard


class _Products(torch.autograd.Function):
    """Two products forward, four backward, on rows that need no routing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        groups: Groups,
        rows: torch.Tensor,
        first: torch.Tensor,
        act: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        rows_times(rows, (up.transpose(1, 2),), groups)
        rows_times(act, (down.transpose(1, 2),), groups)
        ctx.operands = groups, rows, first, act, up, down
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        groups, rows, first, act, up, down = ctx.operands
        rows_times(rows, (down,), groups)
        rows_times(first, (up,), groups)
        rows_outer(first, rows, groups, (len(up),))
        rows_outer(rows, act, groups, (len(up),))
        return grad, None, None, None, None, None, None


def _grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, weight, strict=True)])


def _silu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, linear = up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * linear
