"""What rank processes run for the tests of unsharding ahead."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hf_laer.integrations.transformers import get_engine
from hf_laer.shard import ahead
from hf_laer.shard.pull import Pull
from tests.engine.cases import batch_of, compare_gradients, expected, loss_of, movement, patched, reference_gradients
from tests.models import assert_close, full, tiny_model

LAYERS = 3
SETTINGS: dict[str, Any] = {"slots_per_rank": 3, "history": 1}


def counted(strategy: str, checkpointing: bool, **config: Any) -> dict[str, int]:
    """Equals the unpatched model; counts what set out in the third step: ahead, whole layers, and what was spilled."""
    sizes = {"num_hidden_layers": LAYERS}
    model = patched(tiny_model("qwen3_moe", **sizes), strategy=strategy, **SETTINGS, **config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = get_engine(model)
    assert engine is not None
    for step in range(2):
        _held_to(expected("qwen3_moe", step, sizes).gradients, model, step)
    movement(model)
    unsharder, found = engine.unsharder, {"ahead": 0, "whole": 0, "layers": LAYERS}
    assert (unsharder.arena is not None) == config.get("peer_memory", False)
    expect, begin = unsharder.expect, unsharder.begin

    def expecting(*args: Any) -> None:
        expect(*args)
        found["ahead"] += unsharder._ahead is not None

    def beginning(*args: Any) -> ahead.Coming:
        coming = begin(*args)
        assert all(isinstance(part, Pull) == (unsharder.arena is not None) for part in coming.parts)
        found["whole"] += bool(coming.parts)
        return coming

    unsharder.expect, unsharder.begin = expecting, beginning  # type: ignore[method-assign]
    _held_to(expected("qwen3_moe", 2, sizes).gradients, model, 2)
    assert unsharder._ahead is None, "something is on its way for nobody"
    return found | {"spilled": movement(model)["spilled"]}


def converted(strategy: str, **config: Any) -> list[list[str]]:
    """Every bit as without converting early; the order in which own experts are converted and a plan is made."""
    late, model = (
        patched(tiny_model("mixtral", num_hidden_layers=1), strategy=strategy, compute_dtype="bfloat16", **config)
        for _ in range(2)
    )
    without, engine, blocks = get_engine(late), get_engine(model), ahead._blocks
    assert without is not None
    assert engine is not None
    without.unsharder.convert = lambda want: None  # type: ignore[method-assign]
    steps: list[list[str]] = []
    plans = engine._plans

    def converting(want: ahead.Want) -> dict[str, torch.Tensor]:
        steps[-1].append("converted")
        return blocks(want)

    def planning(*args: Any) -> Any:
        steps[-1].append("planned")
        return plans(*args)

    engine._plans = planning  # type: ignore[method-assign]
    for step in range(3):
        steps.append([])
        with mock.patch.object(ahead, "_blocks", converting):
            got = _backward(model, step)
        for (name, ours), theirs in zip(got.items(), _backward(late, step).values(), strict=True):
            assert torch.equal(ours, theirs), name
        _change(model, late)
    return steps


def copies_that_stay(strategy: str, **config: Any) -> list[int]:
    """Layers whose own experts stay converted: after an evaluation, a forward, and its backward."""
    model = patched(
        tiny_model("mixtral", num_hidden_layers=LAYERS),
        strategy=strategy,
        compute_dtype="bfloat16",
        reshard_after_forward=False,
        **config,
    )
    engine, found = get_engine(model), []
    assert engine is not None

    def count() -> None:
        found.append(sum(kept.own is not None for kept in engine.unsharder._kept.values()))

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss_of(model, batch_of(dist.get_rank()))
        count()
    loss = loss_of(model, batch_of(dist.get_rank()))
    count()
    loss.backward()
    count()
    return found


def _backward(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Every gradient of a step."""
    model.zero_grad()
    loss_of(model, batch_of(dist.get_rank(), step)).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def _compared(model: nn.Module, plain: nn.Module, step: int) -> None:
    _, want = reference_gradients(plain, step)
    _held_to(want, model, step)


def _held_to(want: dict[str, torch.Tensor], model: nn.Module, step: int) -> None:
    model.zero_grad()
    loss_of(model, batch_of(dist.get_rank(), step)).backward()
    compare_gradients(model, want)


def unforeseen(how: str, homes: str, **config: Any) -> None:
    """What was sent ahead and is not wanted, or is no longer right, is not used."""
    plain, model = (tiny_model("mixtral", num_hidden_layers=LAYERS) for _ in range(2))
    settings = {**SETTINGS, "slots_per_rank": 4 + (homes == "whole"), "peer_memory": False, **config}
    patched(model, strategy=f"fsep+llep:{homes}", **settings)
    for step in range(2):
        _compared(model, plain, step)
    EVENTS[how](model, plain)
    for step in range(2, 4):
        _compared(model, plain, step)


def _other_order(model: nn.Module, plain: nn.Module) -> None:
    for one in (model, plain):
        one.model.layers = nn.ModuleList(one.model.layers[index] for index in (2, 0, 1))
    _compared(model, plain, 5)


def _raises(model: nn.Module, plain: nn.Module, layer: int = 1) -> None:
    """A forward that ends before a layer."""
    handle = model.model.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        loss_of(model, batch_of(dist.get_rank()))
    handle.remove()
    _change(model, plain)


def _part(model: nn.Module, plain: nn.Module) -> None:
    """A pass of which the model as a whole knows nothing."""
    batch, hidden = batch_of(dist.get_rank(), 7), []
    for one in (model, plain):
        hidden.append(one.model(input_ids=batch).last_hidden_state)
        one.zero_grad()
    torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
    hidden[0].sum().backward()
    _change(model, plain)


def _raises_then_part(model: nn.Module, plain: nn.Module) -> None:
    """The model has begun, and the pass that follows is one of which it knows nothing."""
    _raises(model, plain, layer=0)
    _part(model, plain)


def _assigned(model: nn.Module, plain: nn.Module) -> None:
    """Other parameters in the place of the experts', changed as often as these: never."""
    ids = batch_of(dist.get_rank(), 9)
    with torch.no_grad():
        for one in (model, plain):
            one.load_state_dict({name: value.clone() for name, value in one.state_dict().items()}, assign=True)
        for _ in range(2):
            model(input_ids=ids)
        for one in (model, plain):
            changed = {name: value * (1.5 if "experts" in name else 1) for name, value in one.state_dict().items()}
            one.load_state_dict(changed, assign=True)
        assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, "logits")


def _copied(model: nn.Module, plain: nn.Module) -> None:
    """A copy is a model of its own, and tells the engine nothing."""
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert get_engine(other) is None
    engine = get_engine(model)
    assert engine is not None
    for hook in other._forward_pre_hooks.values():
        assert hook(other, ()) is None
    assert engine.unsharder._ahead is None


def _evaluates(model: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad():
        loss_of(model, batch_of(dist.get_rank(), 9))
    _change(model, plain)
    with torch.inference_mode():
        loss_of(model, batch_of(dist.get_rank(), 9))


def _change(model: nn.Module, plain: nn.Module) -> None:
    """Changes weights behind autograd's back."""
    with torch.no_grad():
        for one in (model, plain):
            for name, parameter in one.named_parameters():
                if "experts" in name:
                    data = parameter.data
                    (data.to_local() if hasattr(data, "to_local") else data).mul_(1.5)


def _in_flight(model: nn.Module, plain: nn.Module) -> None:
    """Two micro-batches' forwards before their backwards, in either order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for order in ((0, 1), (1, 0)):
        plain.zero_grad()
        for step in (0, 1):
            losses = [loss_of(plain, batch_of(other, step)) for other in range(world)]
            torch.stack(losses).mean().backward()
        want = {name: p.grad.clone() for name, p in plain.named_parameters()}
        model.zero_grad()
        losses = [loss_of(model, batch_of(rank, step)) for step in (0, 1)]
        for step in order:
            losses[step].backward()
        compare_gradients(model, want)


EVENTS = {
    "order": _other_order,
    "raises": _raises,
    "raises at once": partial(_raises, layer=0),
    "part": _part,
    "raises, part": _raises_then_part,
    "assigned": _assigned,
    "copied": _copied,
    "eval": _evaluates,
    "replaced": _change,
    "in flight": _in_flight,
}
