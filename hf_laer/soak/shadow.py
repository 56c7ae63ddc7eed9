"""The shadow: an unpatched model that is given the run's weights and moments, and takes the same step.

Two long runs drift apart by rounding alone, so it is not they that are compared, but one step from the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_laer.soak.task import CLIP, EPSILON, Settings, optimizer_of, step_shadow, tiny_model

State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Compared:
    """One step beside the shadow's: the largest relative distance, and whose.

    Args:
        step: Which.
        gradient: Of the gradients, before clipping.
        update: Of AdamW's updates.
        gradient_of: Whose gradient.
        update_of: Whose update.
    """

    step: int
    gradient: float
    update: float
    gradient_of: str
    update_of: str


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy. Collective where it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizer: Any) -> State:
    """Weights, and AdamW's moments and step where it has any, by parameter. Collective."""
    state: State = {}
    for name, parameter in model.named_parameters():
        held = optimizer.state.get(parameter, {})
        moments = {key: full(value) for key, value in held.items() if torch.is_tensor(value)}
        state[plain_name(name)] = {"weight": full(parameter), **moments}
    return state


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient in full. Collective."""
    named = model.named_parameters()
    return {plain_name(n): full(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named}


def plain_name(name: str) -> str:
    """A parameter's name in the bare model."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


class Shadow:
    """An unpatched model on one process.

    Args:
        settings: The soak's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model = tiny_model(settings.seed)

    def compare(self, step: int, before: State, gradients: dict[str, torch.Tensor], after: State) -> Compared:
        """Takes ``step`` from ``before`` and compares what the run did.

        Args:
            step: Which.
            before: The run's state before it.
            gradients: The run's, before clipping.
            after: The run's state after it.
        """
        optimizer = self._put(before)
        _, want = step_shadow(self._model, self._settings, step)
        far = {name: distance(gradients[name], want[name]) for name in want}
        for name, parameter in self._model.named_parameters():
            parameter.grad = want[name]
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        optimizer.step()
        mine = state_of(self._model, optimizer)
        moved = {name: distance(_update(after[name]), _update(mine[name])) for name in mine}
        worst, farthest = (max(which, key=lambda name: which[name]) for which in (far, moved))
        return Compared(step, far[worst], moved[farthest], worst, farthest)

    def _put(self, state: State) -> torch.optim.AdamW:
        optimizer = optimizer_of(self._model)
        for name, parameter in self._model.named_parameters():
            held = {key: value.clone() for key, value in state[name].items()}
            parameter.data.copy_(held.pop("weight"))
            if held:
                optimizer.state[parameter] = held
        return optimizer


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over that of ``want``; exact zeros must stay zero."""
    error, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return error / norm if norm else (0.0 if error == 0 else float("inf"))


def _update(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The direction of AdamW's step, from its moments: differences of weights would carry the weights' rounding."""
    steps, first, second = (state[key].double() for key in ("step", "exp_avg", "exp_avg_sq"))
    return first / (1 - 0.9**steps) / ((second / (1 - 0.999**steps)).sqrt() + EPSILON)


def same_state(got: State, want: State) -> list[str]:
    """What differs, by a single bit."""
    return [
        f"{key} of {name}"
        for name, held in want.items()
        for key, value in held.items()
        if not torch.equal(got[name].get(key, torch.empty(0)), value)
    ]
