"""MoE layers with attention between them, as in a model: what prefetching hides shows only here.

Everything dense is FSDP2's, for every contender. For ours the experts are the engine's; for the rival they are FSDP2's
too, with its own prefetch, and run through ``grouped_mm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_laer.bench.layer import Batch, BenchExperts, LayerShape, measure, spec_for, timed
from hf_laer.bench.rivals import own_tokens
from hf_laer.comm.base import Communicator
from hf_laer.config import FSDP2, STRATEGIES, LaerConfig
from hf_laer.engine import Engine
from hf_laer.profile import Profile
from hf_laer.shard.ahead import Coming, Era, Kept, Unsharder, Want

CONTENDERS = (*STRATEGIES, FSDP2)
# The stack without its experts, and the products of one layer alone: measured in every run.
ATTENTION, GEMM = "attention", "gemm"


@dataclass(frozen=True)
class StackMeasured:
    """One contender under one routing.

    Args:
        contender: A strategy, or a rival.
        routing: The scenario.
        step_ms: Of all layers, forward and backward, median, of the slowest rank.
        layer_ms: Of that, what one layer's experts take: without the stack that has none, over the layers.
        peak_gb: GiB above weights and their gradients, of the fullest rank.
        unshard_ms: One layer's unshard alone, with nothing to hide under; 0 where nothing travels.
        unshard_gb_s: Its bytes that arrive, GB/s.
        hidden: The part of all unshards that costs no time: 1 - (step - step without unshards) / unshards.
    """

    contender: str
    routing: str
    step_ms: float
    layer_ms: float
    peak_gb: float
    unshard_ms: float = 0.0
    unshard_gb_s: float = 0.0
    hidden: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Attention(nn.Module):
    """Causal attention, heads of 128, over sequences of ``length`` tokens: ``[T, H]`` to ``[T, H]``."""

    def __init__(self, hidden: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.heads, self.length = max(1, hidden // 128), length
        self.into, self.out_of = (nn.Linear(hidden, size, **kind) for size in (3 * hidden, hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        split = self.into(hidden).view(-1, self.length, 3, self.heads, hidden.shape[1] // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_of(mixed.transpose(1, 2).reshape(hidden.shape))


class GroupedExperts(BenchExperts):
    """The experts as FSDP2 runs them: gathered by it, own tokens alone."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        weights = self.get_parameter("gate_up_proj"), self.get_parameter("down_proj")
        return own_tokens(hidden, index, gates, *weights)


class EngineExperts(BenchExperts):
    """The experts as the engine runs them."""

    run: Callable[..., torch.Tensor]

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return self.run(hidden, index, gates)


class Block(nn.Module):
    """Attention, then experts if there are any, each added to its input."""

    def __init__(self, attention: Attention, experts: nn.Module | None) -> None:
        super().__init__()
        self.attention, self.experts = attention, experts

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden if self.experts is None else hidden + self.experts(hidden, index, gates)


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor, chosen: Sequence[torch.Tensor], gates: torch.Tensor) -> torch.Tensor:
        for block, index in zip(self.blocks, chosen, strict=True):
            hidden = block(hidden, index, gates)
        return hidden


class MeasuredUnsharder(Unsharder):
    """An unsharder that can be told to bring nothing, and to bring one layer's experts with nothing beside it.

    Args:
        unsharder: In whose place it comes.

    Attributes:
        stubbed: Slots are taken for filled.
        wants: What each layer wanted last.
    """

    def __init__(self, unsharder: Unsharder) -> None:
        super().__init__(unsharder._pool)
        self.nodes, self.arena, self.keeps = unsharder.nodes, unsharder.arena, unsharder.keeps
        self.stubbed = False
        self.wants: dict[str, Want] = {}
        self._calls = 0

    def expect(self, want: Want, comm: Communicator, forward: Era | None = None) -> None:
        if not self.stubbed:
            super().expect(want, comm, forward)

    def begin(self, want: Want, comm: Communicator, forward: Era | None = None) -> Coming:
        self.wants[want.layer] = want
        if not self.stubbed:
            return super().begin(want, comm, forward)
        self._kept[want.layer] = Kept(want, self._room(want, comm.rank, 0, self._set(want, self._side)), None)
        return Coming(want, [])

    def alone(self, want: Want, comm: Communicator) -> None:
        """One layer's, now."""
        self._calls += 1
        self.finish(super().begin(replace(want, era=("bench", self._calls)), comm))


def arriving(want: Want, rank: int) -> int:
    """Bytes of what is wanted that come from other ranks."""
    total = 0
    for home in want.homes.values():
        layout = home.layout
        for other in range(len(layout.experts)):
            experts = sum(expert in layout.experts[other] for expert in want.fetched[rank] if other != rank)
            total += experts * len(layout.rows[other]) * math.prod(layout.shape[2:]) * want.dtype.itemsize
    return total


@dataclass
class _Made:
    """A stack ready to run, and what gets gradients beside the tokens."""

    stack: nn.Module
    weights: list[nn.Parameter]
    engine: Engine | None = None
    unsharder: MeasuredUnsharder | None = None

    def step(self, batch: Batch) -> None:
        """Forward and backward."""
        for tensor in (batch.hidden, batch.gates, *self.weights):
            tensor.grad = None
        self.stack(*batch()).backward(batch.grad)


class StackBench:
    """Contenders over one stack. What has been made is let go when the next is made.

    Args:
        shape: The layers; ``layers`` of them.
        length: Tokens of a sequence; it divides a rank's.
        device: This rank's.
        dtype: Of weights and tokens.
        profile: By which spilling is weighed; ``None`` means what is shipped for the device.
        settings: Of ``LaerConfig``, beside the strategy; ``reshard_after_forward`` is FSDP's for all contenders.

    Raises:
        ValueError: ``length`` does not divide the tokens.
    """

    def __init__(
        self,
        shape: LayerShape,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        profile: Profile | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        if shape.tokens % length:
            raise ValueError(f"--tokens {shape.tokens} must be a multiple of --length {length}")
        self.shape, self.length, self.device, self.dtype = shape, length, device, dtype
        self._profile, self._settings = profile, {"tokens_per_rank": shape.tokens, **(settings or {})}
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def measure(self, contenders: Sequence[str], scenarios: Sequence[str], iterations: int) -> list[StackMeasured]:
        """All of them, each contender made once. Collective over the world."""
        alone = self._timed(self._made(ATTENTION), ATTENTION, scenarios[:1], iterations, 0.0)
        one = measure(replace(self.shape, layers=1), GEMM, scenarios[0], self.device, self.dtype, iterations)
        found = [*alone, StackMeasured(GEMM, scenarios[0], one.step_ms * self.shape.layers, one.step_ms, one.peak_gb)]
        for contender in contenders:
            found += self._timed(self._made(contender), contender, scenarios, iterations, alone[0].step_ms)
        return found

    def _timed(
        self, made: _Made, contender: str, scenarios: Sequence[str], iterations: int, without: float
    ) -> list[StackMeasured]:
        found = []
        for scenario in scenarios:
            batch = Batch(self.shape, scenario, self.device, self.dtype)
            for _ in range(4):
                made.step(batch)
            step_ms, peak = timed(partial(made.step, batch), self.device, iterations)
            layer_ms = (step_ms - without) / self.shape.layers
            peak += made.engine.shared_bytes / 2**30 if made.engine is not None and self.device.type == "cuda" else 0.0
            one = StackMeasured(contender, scenario, step_ms, layer_ms, peak)
            found.append(self._with_unshards(made, batch, one, iterations))
        return found

    def _with_unshards(self, made: _Made, batch: Batch, one: StackMeasured, iterations: int) -> StackMeasured:
        """How much of the unshards is hidden, where weights travel."""
        engine, unsharder = made.engine, made.unsharder
        if engine is None or unsharder is None:
            return one
        comm, want = engine.comms.weights, next(iter(unsharder.wants.values()))
        sent = torch.tensor([float(arriving(want, comm.rank))], device=self.device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        if sent.item() == 0:
            return one
        unshard_ms, _ = timed(partial(unsharder.alone, want, comm), self.device, iterations)
        unsharder.stubbed = True
        stubbed_ms, _ = timed(partial(made.step, batch), self.device, iterations)
        unsharder.stubbed = False
        # The last layer's serves its forward and its backward, or every layer's does.
        unshards = self.shape.layers if unsharder.keeps else 2 * self.shape.layers - 1
        hidden = 1 - (one.step_ms - stubbed_ms) / (unshards * unshard_ms)
        return replace(one, unshard_ms=unshard_ms, unshard_gb_s=sent.item() / unshard_ms / 1e6, hidden=hidden)

    def _made(self, contender: str) -> _Made:
        """The stack of one contender, sharded. Collective over the world."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        kind = self.device, self.dtype
        experts = GroupedExperts if contender == FSDP2 else EngineExperts
        blocks = [
            Block(
                Attention(self.shape.hidden, self.length, *kind),
                None if contender == ATTENTION else experts(self.shape, *kind),
            )
            for _ in range(self.shape.layers)
        ]
        stack = Stack(blocks)
        if contender in (ATTENTION, FSDP2):
            self._shard(stack)
            return _Made(stack, list(stack.parameters()))
        config = LaerConfig(strategy=contender, **self._settings)
        engine = Engine(config, ranks_per_node=dist.get_world_size(), profile=self._profile)
        for at, block in enumerate(blocks):
            assert isinstance(block.experts, EngineExperts)
            block.experts.run = engine.add_layer(f"blocks.{at}", block.experts, spec_for(self.shape))
        detached = engine.detach()
        layers = self._shard(stack)
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        engine.attach(detached, self._mesh)
        engine.foresight.follow(stack)
        engine.unsharder = MeasuredUnsharder(engine.unsharder)
        return _Made(stack, list(stack.parameters()), engine, engine.unsharder)

    def _shard(self, stack: Stack) -> list[FSDPModule]:
        how: dict[str, Any] = {"mesh": self._mesh}
        how["reshard_after_forward"] = self._settings.get("reshard_after_forward", True)
        layers = [fully_shard(block, **how) for block in stack.blocks]
        fully_shard(stack, mesh=self._mesh)
        return [layer for layer in layers if isinstance(layer, FSDPModule)]
