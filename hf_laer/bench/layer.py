"""One MoE layer, or a stack of such, on all ranks: strategies and rivals, forward and backward, time and memory."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_laer.bench.exchanges import Stopwatch
from hf_laer.bench.models import asked
from hf_laer.bench.planned import PLANNED, PlannedEngine
from hf_laer.bench.rivals import RIVALS, BenchWeights, Rivals
from hf_laer.bench.routing import changes, routings
from hf_laer.compute.gate import FusedGate, Gate
from hf_laer.compute.spec import ExpertsSpec
from hf_laer.config import AUTO, UNION, LaerConfig
from hf_laer.engine import Engine
from hf_laer.plan.types import imbalance
from hf_laer.profile import Profile

LAYERS = {
    "g128": {"experts": 128, "hidden": 2880, "intermediate": 2880, "top_k": 4},
    "g32": {"experts": 32, "hidden": 2880, "intermediate": 2880, "top_k": 4},
    "q128": {"experts": 128, "hidden": 2048, "intermediate": 768, "top_k": 8},
    "m8": {"experts": 8, "hidden": 4096, "intermediate": 14336, "top_k": 2},
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the layer and of one rank's batch; ``layers`` of the kind in a row, each added to its input."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int
    layers: int = 1


@dataclass(frozen=True)
class Measured:
    """One contender under one routing.

    Args:
        contender: A strategy, what ``auto`` chose, or a rival.
        routing: The scenario.
        forward_ms: Median over iterations, of the slowest rank; the mean where routing changes from step to step.
        step_ms: The same, forward and backward.
        peak_gb: GiB above weights and their gradients, of the fullest rank; memory that ranks share included.
        imbalance_before: Max/mean over ranks with static owners, mean over layers and steps; 0 for rivals.
        imbalance_after: As planned.
        exchange_ms: Of a step, what a rank's products wait for tokens, mean over ranks; where it was asked for.
    """

    contender: str
    routing: str
    forward_ms: float
    step_ms: float
    peak_gb: float
    imbalance_before: float = 0.0
    imbalance_after: float = 0.0
    exchange_ms: float = 0.0

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
    settings = {} if changes(scenario) else {"history": 1}
    bench = Bench(shape, device, dtype, rivals, profile, settings)
    return bench.measure([contender], scenario, iterations)[0]


@dataclass
class Contender:
    """Something that runs the layers.

    Args:
        run: Output ``[T, H]`` from tokens ``[T, H]``, choices ``[T, K]`` for each layer, and weights ``[T, K]``.
        weights: What gets gradients beside the tokens.
        engine: Ours, where it is one.
        watch: Times the exchanges of tokens, where that was asked for.
    """

    run: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
    weights: Sequence[torch.Tensor]
    engine: Engine | None = None
    watch: Stopwatch | None = None


class Bench:
    """Contenders over layers of one shape. What has been made is kept; strategies with one kind of home share it.

    Args:
        shape: The layers.
        device: This rank's.
        dtype: Of weights and tokens.
        rivals: Contenders that are not the engine's, by name.
        profile: By which strategies are chosen and spilling is weighed; ``None`` means what is shipped for the device.
        settings: Of ``LaerConfig``, beside the strategy.
        exchanges: Whether the time of token exchanges is taken.
    """

    def __init__(
        self,
        shape: LayerShape,
        device: torch.device,
        dtype: torch.dtype,
        rivals: Rivals = RIVALS,
        profile: Profile | None = None,
        settings: dict[str, Any] | None = None,
        exchanges: bool = False,
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._rivals, self._profile, self._exchanges = rivals, profile, exchanges
        self._settings = {"tokens_per_rank": shape.tokens, **(settings or {})}
        self._made: dict[str, Contender] = {}

    def contender(self, name: str) -> Contender:
        """The contender of that name, ready to run. Collective where it has to be made."""
        strategy, homes = asked(name)
        key = f"home {homes}" if homes is not None else name
        if key not in self._made:
            self._made[key] = self._rival(name) if name in self._rivals else self._ours(name)
        made = self._made[key]
        for layer in made.engine.layers.values() if made.engine is not None and homes is not None else ():
            chosen = homes if strategy == UNION else None
            layer.config = replace(layer.config, strategy=strategy, expert_homes=chosen)
        return made

    def measure(self, names: Sequence[str], scenario: str, iterations: int, blocks: int = 1) -> list[Measured]:
        """Measures contenders under one routing, in turns, ``blocks`` times each. Collective over the world."""
        turns = {name: _Turn(self, name, Batch(self.shape, scenario, self.device, self.dtype)) for name in names}
        for turn in turns.values():
            turn.warm(3)
        for _, turn in itertools.product(range(blocks), turns.values()):
            turn.take(iterations)
        return [turn.measured(scenario) for turn in turns.values()]

    def _rival(self, name: str) -> Contender:
        shape = self.shape
        sizes = shape.experts, shape.hidden, shape.intermediate, shape.top_k
        made = self._rivals[name](BenchWeights(*sizes, self.device, self.dtype))
        return Contender(lambda hidden, chosen, gates: made(hidden, chosen[0], gates), made.parameters)

    def _ours(self, name: str) -> Contender:
        modules = {
            f"experts.{at}": BenchExperts(self.shape, self.device, self.dtype) for at in range(self.shape.layers)
        }
        engine, ranks = self._engine(name), dist.get_world_size()
        layers = [engine.add_layer(key, module, spec_for(self.shape)) for key, module in modules.items()]
        engine.attach(engine.detach(), init_device_mesh(self.device.type, (ranks,)))
        watch = Stopwatch(engine.comms.tokens) if self._exchanges else None
        if watch is not None:
            engine.comms = replace(engine.comms, tokens=watch)

        def run(hidden: torch.Tensor, chosen: Sequence[torch.Tensor], gates: torch.Tensor) -> torch.Tensor:
            if len(layers) == 1:
                return layers[0](hidden, chosen[0], gates)
            for layer, index in zip(layers, chosen, strict=True):
                hidden = hidden + layer(hidden, index, gates)
            return hidden

        weights = [weight for module in modules.values() for weight in module.parameters()]
        return Contender(run, weights, engine, watch)

    def _engine(self, name: str) -> Engine:
        ranks = dist.get_world_size()
        if name in PLANNED:
            # What they weigh, they weigh by the cost model.
            settings = self._settings | PLANNED[name] | {"imbalance_threshold": None}
            config = LaerConfig(strategy="fsep", **settings)
            return PlannedEngine(name, config, ranks_per_node=ranks, profile=self._profile)
        # Any strategy of the kind: a layer's is set when it runs; one that exchanges tokens makes their group.
        strategy, homes = asked("fsep" if name == "fsdp" else name)
        config = LaerConfig(strategy=strategy, expert_homes=homes if strategy == UNION else None, **self._settings)
        return Engine(config, ranks_per_node=ranks, profile=self._profile)


class Batch:
    """One rank's tokens and where they go, which may change from call to call.

    Args:
        shape: The layers.
        scenario: The routing.
        device: Where the tokens are.
        dtype: Theirs.
    """

    # Steps of routing that changes, before it starts over.
    STEPS = 48

    def __init__(self, shape: LayerShape, scenario: str, device: torch.device, dtype: torch.dtype) -> None:
        sizes = shape.tokens, shape.experts, shape.top_k
        here = dist.get_rank(), dist.get_world_size(), device, self.STEPS
        self.hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
        self.gates = torch.full(
            (shape.tokens, shape.top_k), 1.0 / shape.top_k, device=device, dtype=dtype, requires_grad=True
        )
        self.grad = torch.randn_like(self.hidden)
        layers = [routings(scenario, sizes, *here, layer=at) for at in range(shape.layers)]
        self.changes = changes(scenario)
        self._steps: Iterator[tuple[torch.Tensor, ...]] = itertools.cycle(zip(*layers, strict=True))

    def __call__(self) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]:
        """Tokens, choices of each layer, weights: of the next step."""
        return self.hidden, next(self._steps), self.gates


class _Turn:
    """One contender's calls under one routing, and what came of them."""

    def __init__(self, bench: Bench, name: str, batch: Batch) -> None:
        self._bench, self._name, self._batch = bench, name, batch
        self._found: list[tuple[float, float, float]] = []
        self._exchanges: list[float] = []
        self._imbalance: list[tuple[float, float]] = []

    def warm(self, steps: int) -> None:
        made = self._bench.contender(self._name)
        for _ in range(steps):
            self._step(made)

    def take(self, iterations: int) -> None:
        """Times forwards, then steps."""
        made, device = self._bench.contender(self._name), self._bench.device
        average = statistics.fmean if self._batch.changes else statistics.median
        forward_ms, _ = timed(lambda: self._forward(made), device, iterations, average)
        self._observed(made, iterations)
        step_ms, peak = timed(lambda: self._step(made), device, iterations, average)
        peak += made.engine.shared_bytes / 2**30 if made.engine is not None and device.type == "cuda" else 0.0
        imbalances, exchange_ms = self._observed(made, iterations)
        self._imbalance += imbalances[-iterations * self._bench.shape.layers :]
        self._exchanges.append(exchange_ms)
        self._found.append((forward_ms, step_ms, peak))

    def measured(self, scenario: str) -> Measured:
        """What came out, over all turns. Collective."""
        forward_ms, step_ms, _ = (statistics.median(values) for values in zip(*self._found, strict=True))
        before, after = (statistics.fmean(values) for values in zip(*self._imbalance or [(0.0, 0.0)], strict=True))
        exchange = torch.tensor(statistics.fmean(self._exchanges or [0.0]), device=self._bench.device)
        dist.all_reduce(exchange)
        name, engine = self._name, self._bench.contender(self._name).engine
        if name == AUTO and engine is not None:
            name = f"auto: {next(iter(engine.layers.values())).config.strategy}"
        peak = max(peak for *_, peak in self._found)
        return Measured(
            name, scenario, forward_ms, step_ms, peak, before, after, exchange.item() / dist.get_world_size()
        )

    def _observed(self, made: Contender, iterations: int) -> tuple[list[tuple[float, float]], float]:
        """Max/mean over ranks, before and after planning, of each layer and step since the last time; exchanges."""
        records = made.engine.recorder.drain() if made.engine is not None else []
        imbalances = [(imbalance(record.loads_before), imbalance(record.loads_after)) for record in records]
        return imbalances, made.watch.milliseconds(iterations + 1) if made.watch is not None else 0.0

    def _forward(self, made: Contender) -> None:
        # Layouts follow what training sees; where loads change they must see each step.
        with torch.set_grad_enabled(self._batch.changes):
            made.run(*self._batch())

    def _step(self, made: Contender) -> None:
        for tensor in (self._batch.hidden, self._batch.gates, *made.weights):
            tensor.grad = None
        made.run(*self._batch()).backward(self._batch.grad)


def timed(
    call: Callable[[], None],
    device: torch.device,
    iterations: int,
    average: Callable[[list[float]], float] = statistics.median,
) -> tuple[float, float]:
    """Median (or another average) milliseconds and peak GiB above what was held before, each of the worst rank."""
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
    worst = torch.tensor([average(times) * 1e3, peak], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst[0].item(), worst[1].item()


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given; host time counts, as it does in training."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
