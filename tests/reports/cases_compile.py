"""What rank processes run for the reports on recompute, compilation and determinism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from tests.engine.cases import (
    UNEVEN,
    average_dense_gradients,
    batch_of,
    compare_gradients,
    loss_of,
    patched,
    reference_gradients,
)
from tests.integrations import rig
from tests.integrations.cases import Counts, counted
from tests.models import assert_close, full, repeatable, tiny_model

Gradients = dict[str, torch.Tensor]


def recomputed(strategy: str) -> dict[str, int]:
    """B75. bf16 with and without checkpointing: bit for bit the same gradients, whichever way ties fall.

    Returns:
        Tokens that the routers sent elsewhere in the recompute, by kind of run.
    """
    counts = {}
    for ties in (True, False):
        _, want = _backward(strategy, ties=ties)
        for recompute in ("layer", "experts"):
            engine, got = _backward(strategy, ties=ties, recompute=recompute)
            _assert_equal(got, want)
            counts[f"{ties} {recompute}"] = _rerouted(engine)
        if ties:
            engine, got = _backward(strategy, ties=True, recompute="layer", drift=True)
            # Only a router's own gradient follows the choices that it makes in the recompute.
            _assert_equal(*({name: grad for name, grad in run.items() if "gate" not in name} for run in (got, want)))
            counts["drift"] = _rerouted(engine)
    with pytest.raises(ValueError, match="use_reentrant"):
        patched(tiny_model("qwen3_moe")).gradient_checkpointing_enable({"use_reentrant": True})
    return counts


def _backward(strategy: str, *, ties: bool, recompute: str | None = None, drift: bool = False) -> tuple[Any, Gradients]:
    """One micro-batch; all experts alike where ``ties``, the recompute then choosing others where ``drift``."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    for layer in model.model.layers if ties else ():
        nn.init.zeros_(layer.mlp.gate.weight)
    for layer in model.model.layers if drift else ():
        layer.mlp.gate.register_forward_hook(_choose_otherwise)
    patched(model, strategy=strategy, recompute=recompute or "layer")
    if recompute is not None:
        model.gradient_checkpointing_enable()
    loss_of(model, batch_of(dist.get_rank())).backward()
    return get_engine(model), _gradients(model)


def _choose_otherwise(router: nn.Module, arguments: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, index = out
    recomputing = torch._C._current_graph_task_id() != -1
    return (logits, weights, (index + 1) % 7) if recomputing else out


def _gradients(model: nn.Module) -> Gradients:
    """This rank's own, and the experts' in full."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _assert_equal(got: Gradients, want: Gradients) -> None:
    assert got.keys() == want.keys()
    differing = [name for name in got if not torch.equal(got[name], want[name])]
    assert not differing, differing


def _rerouted(engine: Any) -> int:
    return sum(layer.rerouted for layer in engine.layers.values())


def deterministic(family: str, strategy: str) -> None:
    """B79. Two runs of two steps in deterministic mode, which fills fresh memory with NaN: the same bits."""
    with repeatable():
        runs = [_two_steps(family, strategy) for _ in range(2)]
    (losses, got), (more, again) = runs
    assert losses == more
    _assert_equal(got, again)
    assert all(grad.isfinite().all() for grad in got.values())


def _two_steps(family: str, strategy: str) -> tuple[list[float], Gradients]:
    model = patched(tiny_model(family), strategy=strategy, history=1, recompute="experts")
    model.gradient_checkpointing_enable()
    losses = []
    for step in range(2):
        loss = loss_of(model, batch_of(dist.get_rank(), step))
        loss.backward()
        losses.append(loss.item())
    return losses, _gradients(model)


@dataclass
class Compiled:
    """What the compiler did.

    Args:
        graphs: Different graphs so far, after each step.
        breaks: Why graphs were broken.
    """

    graphs: list[int] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def check(self, settled: int, most: int) -> None:
        """Few graphs, no new ones after step ``settled``, broken nowhere but at the experts."""
        assert 0 < self.graphs[-1] <= most, self.graphs
        assert self.graphs[settled] == self.graphs[-1], self.graphs
        assert self.breaks
        assert all("function `<function experts_forward" in why for why in self.breaks), self.breaks

    def note(self) -> None:
        """Called after each step."""
        self.graphs.append(counters["stats"]["unique_graphs"])
        # From torch 2.14 on FSDP's own hooks break graphs, too.
        self.breaks = [why for why in counters["graph_break"] if "skipping FSDP hooks" not in why]


@contextmanager
def _counting() -> Iterator[Compiled]:
    """The compiler as in a new process, and its counts."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield Compiled()
    finally:
        torch._dynamo.reset()


def compiled_block(family: str, strategy: str, backend: str) -> Compiled:
    """B77. A compiled MoE block over steps of differing tokens, of which one rank once has none: as unpatched."""
    plain, model = tiny_model(family), tiny_model(family)
    patched(model, strategy=strategy, history=1)
    eager, block = plain.model.layers[1].mlp, model.model.layers[1].mlp
    block.compile(backend=backend)
    with _counting() as compiled:
        for step, counts in enumerate([(5, 9), (3, 7), (8, 0), (6, 4), (2, 11), (7, 3)]):
            everyone = [_hidden(step, rank, count) for rank, count in enumerate(counts)]
            eager.zero_grad()
            wanted = [_output_and_gradient(eager, hidden) for hidden in everyone]
            block.zero_grad()
            got = _output_and_gradient(block, everyone[dist.get_rank()])
            for ours, theirs in zip(got, wanted[dist.get_rank()], strict=True):
                assert_close(ours, theirs, f"step {step}")
            average_dense_gradients(block)
            for name, parameter in block.named_parameters():
                want = eager.get_parameter(name).grad / dist.get_world_size()
                assert_close(full(parameter.grad), want, f"{name} at step {step}")
            compiled.note()
    return compiled


def _hidden(step: int, rank: int, count: int) -> torch.Tensor:
    return torch.randn(1, count, 34, generator=torch.Generator().manual_seed(10 * step + rank))


def _output_and_gradient(block: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    out = block(hidden)
    out = out[0] if isinstance(out, tuple) else out
    if not out.requires_grad:
        # Eager experts without a token return a constant.
        return out, torch.zeros_like(hidden)
    out.sin().sum().backward()
    assert hidden.grad is not None
    return out.detach(), hidden.grad


def compiled_model(strategy: str, backend: str, whole: bool) -> Compiled:
    """B77. The model compiled as a whole or layer by layer, over two rounds of four shapes: as unpatched."""
    plain, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    patched(model, strategy=strategy, history=1)
    for part in [model] if whole else model.model.layers:
        part.compile(backend=backend)
    with _counting() as compiled:
        for step in range(8):
            batches = UNEVEN[step % 4 :] + UNEVEN[: step % 4]
            losses, want = reference_gradients(plain, step, batches)
            model.zero_grad()
            loss = loss_of(model, batch_of(dist.get_rank(), step, batches))
            loss.backward()
            assert abs(loss.item() - losses[dist.get_rank()]) <= 1e-5 * loss.item()
            compare_gradients(model, want)
            compiled.note()
    return compiled


def regional(strategy: str, backend: str, checkpointing: bool) -> tuple[Counts, Compiled]:
    """Accelerate's regional compilation under FSDP2: ten AdamW steps are the uncompiled, unpatched run's."""
    theirs = rig.reference(rig.run_loop, "", "qwen3_moe", None, 10)
    plugin = {"activation_checkpointing": checkpointing, "laer": rig.eager(strategy=strategy)}
    dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    # The ranks' compilers are enough to fill the cores.
    with rig.fresh_accelerate(), _counting() as compiled, inductor.patch(compile_threads=1):
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, **plugin), dynamo_plugin=dynamo)
        for _ in range(10):
            ours = run.train(1)
            compiled.note()
        engine = get_engine(run.model)
        assert (backend == "inductor") == bool(counters["inductor"])
    rig.assert_same(ours, theirs)
    assert engine is not None
    return counted(engine.recorder.drain()), compiled
