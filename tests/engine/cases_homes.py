"""What rank processes run for experts that live whole with an owner and have replicas ahead of need."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hf_laer import strategy as planning
from hf_laer.engine import Engine
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan import Plan, llep
from hf_laer.shard.ahead import Coming, Want
from hf_laer.shard.home import Layout, sharded_home
from tests.engine import cases
from tests.models import assert_close, full, repeatable, tiny_model
from tests.reports.steered import Steered

# Nearly all tokens to the first two experts, which one rank owns; then to the last ones.
HOT, OTHERS = [0, 1, 0, 1, 0, 1, 0, 2], [4, 3, 4, 3, 4, 3, 4, 0]
LAYERS = 3


def _count(want: Want) -> int:
    """Experts that travel, over all ranks."""
    return sum(map(len, want.fetched))


class Sent:
    """Experts that were sent for: ahead of their layer, or once its loads were known; and how often in vain."""

    def __init__(self, engine: Engine) -> None:
        self.ahead, self.late, self.refused = 0, 0, 0
        unsharder = engine.unsharder
        expect, begin = unsharder.expect, unsharder.begin

        def expecting(want: Want, *args: Any) -> None:
            expect(want, *args)
            self.ahead += _count(want) if unsharder._ahead is not None else 0

        def beginning(want: Want, *args: Any) -> Coming:
            ahead = unsharder._ahead
            self.refused += ahead is not None and not ahead.want.serves(want)
            coming = begin(want, *args)
            assert coming.own is not None, "own experts are used where they live"
            assert _count(want) or not coming.parts, "messages for nothing"
            if coming.parts:
                served = ahead is not None and coming.parts is ahead.parts
                self.late += _count(want) - (_count(ahead.want) if served else 0)
            return coming

        unsharder.expect, unsharder.begin = expecting, beginning  # type: ignore[method-assign]

    def drain(self) -> tuple[int, int]:
        """Ahead and late, since the last time; the same on all ranks."""
        found, self.ahead, self.late = (self.ahead, self.late), 0, 0
        return found


def drifting(experts: int, checkpointing: str | None = None, optimizer: str = "SGD", **config: Any) -> dict[str, Any]:
    """Loads that stay, then turn: replicas are foreseen, used, and wrong; equal to the unpatched model throughout.

    Returns:
        Per step: replicas in the layouts, experts sent ahead and late, and spilled tokens.
    """
    changes = {"num_experts": experts, "num_hidden_layers": LAYERS}
    plain = Steered(tiny_model("qwen3_moe", **changes), [HOT])
    model = tiny_model("qwen3_moe", **changes)
    steered = Steered(model, [HOT])
    slots = -(-experts // dist.get_world_size()) + 1
    settings = {"strategy": "fsep+llep:whole", "slots_per_rank": slots, "history": 1, "forecast": "last", **config}
    if checkpointing is not None:
        settings["recompute"] = checkpointing
    cases.patched(model, **settings)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = get_engine(model)
    assert engine is not None
    sent, found = Sent(engine), []
    passed = _passed(engine)
    steps = [getattr(torch.optim, optimizer)(one.parameters(), lr=1e-2) for one in (plain.model, model)]
    with repeatable():
        for step, experts_of in enumerate((HOT, HOT, HOT, OTHERS, OTHERS)):
            plain.experts = steered.experts = [experts_of]
            want = plain.gradients(step)
            cases.evaluate(model, plain.model, step)
            sent.drain()
            model.zero_grad()
            cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
            ahead, late = sent.drain()
            cases.compare_gradients(model, want)
            moved = cases.movement(model)
            found.append({"replicas": moved["replicas"], "ahead": ahead, "late": late, "spilled": moved["spilled"]})
            for one, named in zip(steps, (plain.model, model), strict=True):
                _put(named, want)
                one.step()
    _same(model, plain.model)
    return {"steps": found, "unused": engine.unsharder._ahead is None, "passed": len(passed)}


def _passed(engine: Engine) -> list[int]:
    """Grows with each exchange inside a node, where ranks pose as several."""
    node, calls = engine.comms.node, []
    if node is not None:
        inner = node.all_to_all

        def counted(*args: Any) -> torch.Tensor:
            calls.append(1)
            return inner(*args)

        node.all_to_all = counted  # type: ignore[method-assign]
    return calls


def _put(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Dense gradients are this rank's; all take the mean, which has been compared."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "full_tensor"):
            parameter.grad = gradients[name].clone()


def _same(model: nn.Module, plain: nn.Module) -> None:
    want = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(full(parameter).detach(), want[name].detach(), name)


def refused(checkpointing: bool) -> list[tuple[int, int]]:
    """Every other plan does without the replicas that are on their way, as a cost model may want it; equal throughout.

    Returns:
        Per step, experts sent ahead, and how often that was in vain.
    """
    changes = {"num_experts": 6, "num_hidden_layers": LAYERS}
    plain, model = Steered(tiny_model("qwen3_moe", **changes), [HOT]), tiny_model("qwen3_moe", **changes)
    Steered(model, [HOT])
    cases.patched(model, strategy="fsep+llep:whole", history=1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = get_engine(model)
    assert engine is not None
    sent, found, made, ahead = Sent(engine), [], [], planning.llep_ahead

    def alternating(loads: Any, owners: Any, placement: Any, **settings: Any) -> Plan:
        made.append(loads)
        settings.pop("cost")
        if len(made) % 2:
            return llep(loads, owners, **{**settings, "imbalance_threshold": 100.0})
        return ahead(loads, owners, placement, **settings)

    with repeatable(), mock.patch.object(planning, "llep_ahead", alternating):
        for step in range(4):
            want = plain.gradients(step)
            model.zero_grad()
            cases.loss_of(model, cases.batch_of(dist.get_rank(), step)).backward()
            cases.compare_gradients(model, want)
            found.append((sent.drain()[0], sent.refused))
            sent.refused = 0
    return found


def even(experts: int, strategy: str) -> tuple[int, int]:
    """Loads that are level at the owners: what is sent for in a step, ahead and late."""
    changes = {"num_experts": experts, "num_hidden_layers": LAYERS}
    model = tiny_model("qwen3_moe", **changes)
    Steered(model, [list(range(experts))])
    cases.patched(model, strategy=strategy, slots_per_rank=experts, history=1)
    engine = get_engine(model)
    assert engine is not None
    with repeatable():
        for step in range(3):
            if step == 2:
                sent = Sent(engine)
            ids = torch.full((2, experts), 3)
            cases.loss_of(model, ids).backward()
    assert cases.replicas(engine) == 0
    return sent.drain()


def homes_of(**config: Any) -> list[tuple[str | None, int]]:
    """Where each layer's experts were put, and the dimension that is cut."""
    model = cases.patched(tiny_model("qwen3_moe"), **config)
    engine = get_engine(model)
    assert engine is not None
    placed = [
        (layer, home.parameter.placements[-1]) for layer in engine.layers.values() for home in layer.homes.values()
    ]
    return sorted({(layer.config.homes, placement.dim) for layer, placement in placed})


def elsewhere() -> bool:
    """Whether a block that is on another device than the mesh, as offloaded ones are, stays where it is."""
    mesh, layout = cases.world_mesh(), Layout.sharded((4, 6), 0, dist.get_world_size())
    block = torch.zeros(layout.block_shape(dist.get_rank()))
    with mock.patch.object(type(mesh), "device_type", new_callable=mock.PropertyMock, return_value="cuda"):
        home = sharded_home(block, layout, 0, mesh, True)
    return home.local.data_ptr() == block.data_ptr() and home.parameter.shape == (4, 6)
