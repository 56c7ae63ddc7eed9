"""What rank processes run for experts that are read from peers' memory, and for slots that serve twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hf_laer.comm import arena
from hf_laer.integrations.transformers import get_engine
from hf_laer.shard.pull import Pull
from tests.engine import cases
from tests.models import assert_close, full, tiny_model

LAYERS = 3


class _Refused(arena.SharedArena):
    """As memory that the last rank fails to share."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("not permitted")


def refused() -> int:
    """Memory that one rank cannot share is nobody's: experts are sent. Returns warnings."""
    model = tiny_model("mixtral")
    with patch.object(arena, "SharedArena", _Refused), patch.object(arena.logger, "warning") as warned:
        cases.patched(model, strategy="fsep", peer_memory=True)
    engine = get_engine(model)
    assert engine is not None
    assert engine.unsharder.arena is None
    cases.compare_gradients(model, _trained_once(model))
    return warned.call_count


def single(strategy: str) -> int:
    """One expert equals the unpatched model's.

    Returns:
        How often it was read from memory.
    """
    sizes, pulled = {"num_local_experts": 1, "num_experts_per_tok": 1}, []
    begin = Pull.__init__

    def counting(pull: Pull, *args: Any) -> None:
        pulled.append(pull)
        begin(pull, *args)

    with patch.object(Pull, "__init__", counting):
        cases.equal_to_unpatched("mixtral", {"strategy": strategy, "peer_memory": True}, changes=sizes, steps=2)
    return len(pulled)


def _trained_once(model: nn.Module) -> dict[str, torch.Tensor]:
    cases.loss_of(model, cases.batch_of(dist.get_rank())).backward()
    return cases.expected("mixtral", 0).gradients


def trained(family: str, strategy: str, optimizer: str, steps: int, **changes: Any) -> dict[str, int]:
    """An optimizer's steps, an evaluation in each: weights stay the unpatched model's.

    Returns:
        How often experts were pulled, how often sent, and of how many matrices the last rank owns no rows.
    """
    sizes = {"num_hidden_layers": LAYERS, **changes}
    plain, model = (tiny_model(family, **sizes) for _ in range(2))
    cases.patched(model, strategy=strategy, history=1, peer_memory=True)
    found = _ways(model)
    # AdamW divides by sqrt(v) + eps: with the default, gradients that are all rounding move weights by a whole lr.
    settings = {"lr": 1e-3, "eps": 1e-5} if optimizer == "AdamW" else {"lr": 1e-2}
    steppers = [getattr(torch.optim, optimizer)(one.parameters(), **settings) for one in (plain, model)]
    for step in range(steps):
        _, want = cases.reference_gradients(plain, step)
        model.zero_grad()
        cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
        cases.compare_gradients(model, want)
        cases.evaluate(model, plain, step)
        for one, stepper in zip((plain, model), steppers, strict=True):
            for name, parameter in one.named_parameters():
                if not hasattr(parameter, "full_tensor"):
                    parameter.grad = want[name].clone()
            stepper.step()
    for name, parameter in model.named_parameters():
        assert_close(full(parameter).detach(), plain.get_parameter(name).detach(), name)
    engine = get_engine(model)
    assert engine is not None
    homes = [home for layer in engine.layers.values() for home in layer.homes.values()]
    return found | {"empty": sum(not home.layout.rows[-1] for home in homes)}


def _ways(model: nn.Module) -> dict[str, int]:
    """Counts how experts come."""
    engine = get_engine(model)
    assert engine is not None
    assert engine.unsharder.arena is not None
    found = {"pulled": 0, "sent": 0}
    begin = engine.unsharder.begin

    def beginning(*args: Any) -> Any:
        coming = begin(*args)
        for part in coming.parts:
            found["pulled" if isinstance(part, Pull) else "sent"] += 1
        return coming

    engine.unsharder.begin = beginning  # type: ignore[method-assign]
    return found


def wider(strategy: str) -> dict[str, int]:
    """Experts are wanted in a wider dtype than their own, for which there is no room: these come by messages."""
    plain, model = (tiny_model("mixtral", num_hidden_layers=LAYERS, dtype=torch.bfloat16) for _ in range(2))
    cases.patched(model, strategy=strategy, history=1, peer_memory=True)
    found = _ways(model)
    plain.float()
    for step in range(3):
        _evaluate_block(model, plain, step)
        cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
    return found


def _evaluate_block(model: nn.Module, plain: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    hidden = torch.randn(5, 34, generator=generator)
    index = torch.rand(5, 7, generator=generator).topk(2).indices
    weights = torch.rand(5, 2, generator=generator)
    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        with torch.no_grad():
            got = ours.mlp.experts(hidden, index, weights)
            want = theirs.mlp.experts(hidden, index, weights)
        assert_close(got, want, "float32 tokens")


def several(peer_memory: bool) -> None:
    """Two models in one loss, one of which is used twice, beside the unpatched ones."""
    sizes = {"num_hidden_layers": LAYERS}
    pairs = [tuple(tiny_model(family, seed=3, **sizes) for _ in range(2)) for family in ("mixtral", "qwen3_moe")]
    for (_, model), strategy in zip(pairs, ("fsep+llep:sharded", "fsep"), strict=True):
        cases.patched(model, strategy=strategy, history=1, peer_memory=peer_memory)

    def loss(which: int, rank: int, step: int) -> torch.Tensor:
        first, second = (pair[which] for pair in pairs)
        parts = [(first, 3 * step), (second, 3 * step + 1), (first, 3 * step + 2)]
        return torch.stack([cases.loss_of(model, cases.batch_of(rank, at)) for model, at in parts]).prod()

    for step in range(2):
        for one in (model for pair in pairs for model in pair):
            one.zero_grad()
        torch.stack([loss(0, rank, step) for rank in range(dist.get_world_size())]).mean().backward()
        loss(1, dist.get_rank(), step).backward()
        for plain, model in pairs:
            cases.compare_gradients(model, {name: p.grad for name, p in plain.named_parameters()})


def interrupted(strategy: str, peer_memory: bool, checkpointing: bool) -> None:
    """What fails midway, forward or backward, on all ranks, leaves nothing that the next step trips over."""
    plain, model = (tiny_model("mixtral", num_hidden_layers=LAYERS) for _ in range(2))
    cases.patched(model, strategy=strategy, history=1, peer_memory=peer_memory)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    middle = model.model.layers[1]
    fails: dict[str, Callable[[], Any]] = {
        "forward": lambda: middle.register_forward_hook(lambda *_: 1 / 0),
        "backward": lambda: middle.register_full_backward_pre_hook(lambda *_: 1 / 0),
        "experts": lambda: middle.mlp.gate.register_full_backward_pre_hook(lambda *_: 1 / 0),
    }
    _held(plain, model, 0)
    for step, fail in enumerate(fails.values()):
        handle = fail()
        with suppress(ZeroDivisionError):
            cases.loss_of(model, cases.batch_of(dist.get_rank(), 9)).backward()
            raise AssertionError("it did not fail")
        handle.remove()
        _scale(plain, model, 2.0)
        _held(plain, model, 2 * step + 1)
        _held(plain, model, 2 * step + 2)
        _scale(plain, model, 0.5)


def swapped(strategy: str, peer_memory: bool) -> None:
    """An evaluation with other weights (an average, put in place through ``.data``) between forward and backward."""
    plain, model = (tiny_model("mixtral", num_hidden_layers=LAYERS) for _ in range(2))
    cases.patched(model, strategy=strategy, history=1, peer_memory=peer_memory)
    _held(plain, model, 0)
    for step in range(1, 3):
        _, want = cases.reference_gradients(plain, step)
        model.zero_grad()
        loss = cases.loss_of(model, cases.batch_of(dist.get_rank(), step))
        _scale(plain, model, 2.0)
        cases.evaluate(model, plain, step)
        _scale(plain, model, 0.5)
        loss.backward()
        cases.compare_gradients(model, want)


def _held(plain: nn.Module, model: nn.Module, step: int) -> None:
    _, want = cases.reference_gradients(plain, step)
    model.zero_grad()
    cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
    cases.compare_gradients(model, want)


def _scale(plain: nn.Module, model: nn.Module, factor: float) -> None:
    """Changes experts where autograd does not see it; by powers of two, which can be undone."""
    for one in (plain, model):
        for name, parameter in one.named_parameters():
            if "experts" in name:
                data = parameter.data
                (data.to_local() if hasattr(data, "to_local") else data).mul_(factor)


def forgotten() -> list[int]:
    """Models that are no longer used: mappings of arenas while they live, and afterwards; engines that stay."""

    def mapped() -> int:
        return sum("/arena" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    before, alive, most = mapped(), [], 0
    for step in range(3):
        model = tiny_model("mixtral")
        cases.patched(model, strategy="fsep", peer_memory=True)
        cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
        alive.append(weakref.ref(get_engine(model)))
        most = max(most, mapped() - before)
        del model
        gc.collect()
    return [most, mapped() - before, sum(one() is not None for one in alive)]
