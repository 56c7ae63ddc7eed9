"""Whole training steps of a real configuration with random weights and routing on demand, under Accelerate.

Every contender trains the same model on the same tokens: the patched one, FSDP2 with ``grouped_mm``, and Transformers'
own FSDP2 with expert parallelism. Routing is forced by a hook on the routers, after they have computed their logits, so
that the cost of the router is that of the model.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_laer.bench.models import FSDP2, MODELS, NATIVE, REST, Job, asked
from hf_laer.bench.routing import changes, routings
from hf_laer.config import AUTO, LaerConfig
from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.bench import native_ep
from hf_laer.integrations.bench.fresh import fresh_accelerate
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.transformers.families import is_experts

WARM_UP = 3


@dataclass(frozen=True)
class Trained:
    """One contender under one routing.

    Args:
        contender: A strategy, ``fsdp2``, ``native_ep``, or ``no_experts``.
        routing: The scenario.
        step_ms: Median milliseconds of a step, of the slowest rank.
        tokens_per_second: Of one rank.
        peak_gb: GiB on the fullest rank, everything counted; 0 on CPUs.
        loss: Of the last step, on the first rank.
        chosen: How the layers run, where that is ``auto``'s choice.
    """

    contender: str
    routing: str
    step_ms: float
    tokens_per_second: float
    peak_gb: float
    loss: float
    chosen: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def train(job: Job, contender: str, scenario: str, device: torch.device) -> Trained:
    """Trains one contender under one routing. Collective over the world.

    Raises:
        ValueError: The contender needs a newer Transformers.
    """
    with prepared(job, contender, device) as trained:
        return trained(scenario)


@contextmanager
def prepared(job: Job, contender: str, device: torch.device) -> Iterator[Callable[[str], Trained]]:
    """One contender, ready to be trained under one routing after another. Collective over the world.

    Raises:
        ValueError: The contender needs a newer Transformers.
    """
    _give_back()
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model, optimizer, backward = _prepared(job, contender, device, Path(folder))
        forced = ForcedRouting(model, job.steps + WARM_UP)
        engine = get_engine(model)
        choices = engine.choices.values() if engine is not None and contender == AUTO else ()
        chosen = " and ".join(sorted({choice.strategy for choice in choices}))
        if job.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        vocabulary = model.config.vocab_size
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, vocabulary, (job.rows, job.length), generator=generator).to(device)

        def trained(scenario: str) -> Trained:
            forced.begin(scenario)
            found = _timed(job, contender, scenario, device, lambda: _step(model, optimizer, backward, ids, forced))
            shared = 0 if engine is None or device.type != "cuda" else engine.shared_bytes
            return replace(found, chosen=chosen, peak_gb=found.peak_gb + shared / 2**30)

        yield trained


def _step(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None],
    ids: torch.Tensor,
    forced: ForcedRouting,
) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    forced.step += 1
    return loss.detach()


def _timed(job: Job, contender: str, scenario: str, device: torch.device, step: Callable[[], Any]) -> Trained:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = [], torch.zeros(())
    for _ in range(job.steps + WARM_UP):
        dist.barrier()
        start = _now(device)
        loss = step()
        seconds.append(_now(device) - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    worst = torch.tensor([statistics.median(seconds[WARM_UP:]), peak], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    slowest, peak = worst.tolist()
    return Trained(contender, scenario, slowest * 1e3, job.rows * job.length / slowest, peak, float(loss))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _give_back() -> None:
    """The memory of the contender before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prepared(
    job: Job, contender: str, device: torch.device, folder: Path
) -> tuple[PreTrainedModel, torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
    if contender == NATIVE:
        return _native(job, device, folder)
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    plugin["reshard_after_forward"] = job.reshard
    if contender == FSDP2:
        made = FullyShardedDataParallelPlugin(**plugin)
    else:
        made = LaerFSDPPlugin(**plugin, laer=_config(job, contender))
    mixed = "bf16" if device.type == "cuda" else "no"
    accelerator = Accelerator(mixed_precision=mixed, fsdp_plugin=made, cpu=device.type == "cpu")
    model = _random_model(job, device)
    model.set_experts_implementation("grouped_mm")
    model, optimizer = accelerator.prepare(model, _optimizer(model, device))
    if contender == REST:
        _leave_out_experts(model, optimizer.optimizer)
    return model, optimizer, accelerator.backward


def _config(job: Job, contender: str) -> LaerConfig:
    strategy, homes = asked("ep" if contender == REST else contender)
    return LaerConfig(strategy=strategy, expert_homes=homes, tokens_per_rank=job.rows * job.length, **job.laer)


def _leave_out_experts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tokens pass the experts by, which the optimizer steps with gradients of zero; routers run, and learn."""
    experts = [module for module in model.modules() if is_experts(module)]
    gradients = [(weight, torch.zeros_like(weight)) for module in experts for weight in module.parameters()]

    def give_gradients(*_: Any) -> None:
        for weight, gradient in gradients:
            weight.grad = gradient

    for module in experts:
        module.forward = _passed_by
    optimizer.register_step_pre_hook(give_gradients)


def _passed_by(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    return hidden * top_k_weights.sum(-1, keepdim=True).to(hidden.dtype)


def _native(job: Job, device: torch.device, folder: Path) -> Any:
    """Transformers' own FSDP2 and expert parallelism, which only a checkpoint can be loaded into."""
    if not native_ep.is_available():
        raise ValueError(f"contender {NATIVE} needs {native_ep.NEEDS}")
    from transformers.distributed import DistributedConfig

    where = [str(folder)]
    dist.broadcast_object_list(where)
    if dist.get_rank() == 0:
        _random_model(job, device).save_pretrained(where[0])
    dist.barrier()
    size = dist.get_world_size()
    config = DistributedConfig(
        fsdp_size=size, fsdp_mixed_precision=device.type == "cuda", ep_size=size, ep_implementation="all_to_all"
    )
    model = AutoModelForCausalLM.from_pretrained(
        where[0], distributed_config=config, dtype=torch.float32, experts_implementation="grouped_mm"
    )
    dist.barrier()
    # Its parameters lie on two meshes, which no foreach kernel takes.
    return model.train(), _optimizer(model, device, foreach=False), lambda loss: loss.backward()


def _random_model(job: Job, device: torch.device) -> PreTrainedModel:
    sizes = dict(MODELS[job.model], num_hidden_layers=job.layers)
    config = AutoConfig.for_model(sizes.pop("family"), **sizes)
    settings = {} if job.attention is None else {"attn_implementation": job.attention}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **settings).train()


def _optimizer(model: nn.Module, device: torch.device, **settings: Any) -> torch.optim.Optimizer:
    # A rate of zero: random weights under forced routing would drift apart, and every step costs the same.
    return torch.optim.AdamW(model.parameters(), lr=0.0, fused=device.type == "cuda" or None, **settings)


class ForcedRouting:
    """Replaces the routers' choices, not their weights.

    Args:
        model: The model.
        steps: Steps after which routing that changes starts over.

    Attributes:
        step: The step that runs; a recompute finds the routing of its forward.

    Raises:
        ValueError: The model has no routers.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.step, self._steps, self._scenario = 0, steps, "balanced"
        self._made: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
        routers = [module for block in model.modules() for module in _routers(block)]
        if not routers:
            raise ValueError("no router was found beside the experts")
        for at, router in enumerate(routers):
            router.register_forward_hook(partial(self._chosen, at))

    def begin(self, scenario: str) -> None:
        """From here on, choices are that scenario's."""
        self.step, self._scenario = 0, scenario
        self._made.clear()

    def _chosen(
        self, layer: int, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, scores, index = output
        # Layers differ only where routing changes.
        key = layer if changes(self._scenario) else 0, index.shape
        if key not in self._made:
            sizes = len(index), logits.shape[-1], index.shape[1]
            here = dist.get_rank(), dist.get_world_size(), index.device, self._steps
            made = routings(self._scenario, sizes, *here, layer=layer)
            self._made[key] = [chosen.to(index.dtype) for chosen in made]
        series = self._made[key]
        return logits, scores, series[self.step % len(series)]


def _routers(block: nn.Module) -> Iterator[nn.Module]:
    """The router of a block whose child is an experts module."""
    children = dict(block.named_children())
    if any(is_experts(child) for child in children.values()):
        yield from (child for name, child in children.items() if name in ("gate", "router"))
