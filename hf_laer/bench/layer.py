"""One MoE layer on all ranks: the engine's strategies and rivals, forward and forward + backward, time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer.bench.rivals import RIVALS, BenchWeights, Rivals
from hf_laer.bench.routing import routing
from hf_laer.compute.gate import FusedGate, Gate
from hf_laer.compute.spec import ExpertsSpec
from hf_laer.config import AUTO, LaerConfig
from hf_laer.engine import Engine
from hf_laer.profile import Profile

LAYERS = {
    "g128": {"experts": 128, "hidden": 2880, "intermediate": 2880, "top_k": 4},
    "g32": {"experts": 32, "hidden": 2880, "intermediate": 2880, "top_k": 4},
    "q128": {"experts": 128, "hidden": 2048, "intermediate": 768, "top_k": 8},
    "m8": {"experts": 8, "hidden": 4096, "intermediate": 14336, "top_k": 2},
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the layer and of one rank's batch."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int


@dataclass(frozen=True)
class Measured:
    """One contender under one routing.

    Args:
        contender: A strategy, what ``auto`` chose, or a rival.
        routing: The scenario.
        forward_ms: Median over iterations, of the slowest rank.
        step_ms: The same, forward and backward.
        peak_gb: GiB above weights and their gradients, of the fullest rank.
        imbalance_before: Max/mean over ranks with static owners; 0 for rivals.
        imbalance_after: As planned.
    """

    contender: str
    routing: str
    forward_ms: float
    step_ms: float
    peak_gb: float
    imbalance_before: float = 0.0
    imbalance_after: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class BenchExperts(nn.Module):
    """Experts in SiLU-gated layout, with no bias: what the engine and every rival compute here."""

    def __init__(self, shape: LayerShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        e, h, i = shape.experts, shape.hidden, shape.intermediate
        for name, size in (("gate_up_proj", (e, 2 * i, h)), ("down_proj", (e, h, i))):
            values = torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)
            self.register_parameter(name, nn.Parameter(values))


def spec_for(shape: LayerShape) -> ExpertsSpec:
    """The engine's view of :class:`BenchExperts`."""
    fused = FusedGate(interleaved=False, clamped=False)
    gate = Gate(fused.reference, fused)
    return ExpertsSpec(shape.experts, shape.hidden, False, "gate_up_proj", "down_proj", None, None, gate, shape.top_k)


def measure(
    shape: LayerShape,
    contender: str,
    scenario: str,
    device: torch.device,
    dtype: torch.dtype,
    iterations: int,
    rivals: Rivals = RIVALS,
    profile: Profile | None = None,
) -> Measured:
    """Measures one contender, a strategy or one of ``rivals``, under one routing. Collective over the world.

    Strategies are chosen, and spilling is weighed, by ``profile``, or by the one that is shipped for the device.
    """
    rank = dist.get_rank()
    index = routing(scenario, shape.tokens, shape.experts, shape.top_k, rank, device)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    gates = torch.full(index.shape, 1.0 / shape.top_k, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(hidden)
    run, weights, engine = _contender(shape, contender, device, dtype, rivals, profile)

    def forward() -> None:
        with torch.no_grad():
            run(hidden, index, gates)

    def step() -> None:
        for tensor in (hidden, gates, *weights):
            tensor.grad = None
        run(hidden, index, gates).backward(grad)

    for _ in range(3):
        step()
    forward_ms, _ = timed(forward, device, iterations)
    step_ms, peak = timed(step, device, iterations)
    record = engine.recorder.drain()[-1] if engine is not None else None
    before, after = (0.0, 0.0)
    if record is not None:
        before, after = (float(x.max() * len(x) / x.sum()) for x in (record.loads_before, record.loads_after))
    if contender == AUTO and engine is not None:
        contender = f"auto: {engine.layers['experts'].config.strategy}"
    return Measured(contender, scenario, forward_ms, step_ms, peak, before, after)


def _contender(
    shape: LayerShape,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    rivals: Rivals = RIVALS,
    profile: Profile | None = None,
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], Engine | None]:
    if name in rivals:
        made = rivals[name](BenchWeights(shape.experts, shape.hidden, shape.intermediate, shape.top_k, device, dtype))
        return made, made.parameters, None
    module = BenchExperts(shape, device, dtype)
    config = LaerConfig(strategy=name, history=1, tokens_per_rank=shape.tokens)
    engine = Engine(config, ranks_per_node=dist.get_world_size(), profile=profile)
    layer = engine.add_layer("experts", module, spec_for(shape))
    engine.attach(engine.detach(), init_device_mesh(device.type, (dist.get_world_size(),)))
    return layer, list(module.parameters()), engine


def timed(call: Callable[[], None], device: torch.device, iterations: int) -> tuple[float, float]:
    """Median milliseconds and peak GiB above what was held before, each of the worst rank."""
    call()
    base = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    times = []
    for _ in range(iterations):
        dist.barrier()
        start = _now(device)
        call()
        times.append(_now(device) - start)
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if device.type == "cuda" else 0.0
    worst = torch.tensor([statistics.median(times) * 1e3, peak], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst[0].item(), worst[1].item()


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given; host time counts, as it does in training."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
