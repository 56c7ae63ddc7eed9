"""An optimizer made before its model is sharded on a mesh follows the parameters to their new objects.

Accelerate does this by name inside ``prepare``; without Accelerate the optimizer is told at its first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

# Entries vanish with the last optimizer that holds the old parameter; an empty map costs a step nothing.
_successors = WeakTensorKeyDictionary()
_installed: list[Any] = []


def follow(old: nn.Parameter, new: nn.Parameter) -> None:
    """Makes every optimizer that holds ``old`` hold ``new`` from its next step on, and frees the memory of ``old``."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_switch))
    _successors[old] = new
    old.data = old.data.new_empty(0)


def _switch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not len(_successors):
        return
    for group in optimizer.param_groups:
        for old in group["params"]:
            if old in _successors and optimizer.state.get(old):
                raise RuntimeError(
                    "the optimizer has taken steps before patch_model(model, mesh=mesh) sharded the experts: patch "
                    "first, or make a new optimizer"
                )
        group["params"] = [_successors.get(old, old) for old in group["params"]]
