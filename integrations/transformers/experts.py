"""The function registered with Transformers' experts interface: it hands marked modules to their engine."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_laer.compute.low_rank import LowRank
from hf_laer.engine import Engine
from hf_laer.layer import MoELayer

NAME = "hf_laer"
_MARK = "_hf_laer_mark"


class Mark:
    """Ties a module to its layer. A copied or pickled module is an ordinary one again, with the same mark emptied.

    Args:
        layer: The engine's side of the module; ``None`` where the engine does not run it.
        config: The config that the module had before, which other models may share: it never names us.

    Attributes:
        engine: The model's, also where it has left this module to FSDP2.
        adapters: By parameter, the low-rank additions of the forward that is running.
        settled: The adapters, by parameter and name, that were there when the model was sharded; ``None`` before.
    """

    def __init__(self, layer: MoELayer | None, config: Any) -> None:
        self.layer, self.config = layer, config
        self.engine: Engine | None = None if layer is None else layer.engine
        self.adapters: dict[str, list[LowRank]] = {}
        self.settled: set[tuple[str, str]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return Mark(None, copy.deepcopy(self.config, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mark, (None, self.config)


def mark(module: nn.Module, layer: MoELayer) -> None:
    """Marks a module as run by ``layer``; it gets a config of its own, which names us."""
    found = mark_of(module)
    config: Any = module.config if found is None else found.config
    ours = copy.copy(config)
    ours._experts_implementation_internal = NAME
    module.__dict__[_MARK] = Mark(layer, config)
    module.config = ours


def release(module: nn.Module) -> None:
    """Lets a marked module run as it did before; its mark still says whose it was."""
    found = module.__dict__[_MARK]
    found.layer = None
    module.config = found.config


def unmark(module: nn.Module) -> None:
    """Makes it an ordinary module again."""
    found = module.__dict__.pop(_MARK, None)
    if found is not None:
        module.config = found.config


def is_looped(module: nn.Module) -> bool:
    """Whether a marked module's own implementation is not the grouped one, and runs expert by expert."""
    return (module.__dict__[_MARK].config._experts_implementation or "eager") != "grouped_mm"


def mark_of(module: nn.Module) -> Mark | None:
    """The module's mark."""
    return module.__dict__.get(_MARK)


def register() -> None:
    """Registers the function; calling it again changes nothing."""
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@torch.compiler.disable
def experts_forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a marked module through its engine; any other as it ran before.

    Families name the three arguments differently; they mean ``hidden [T, H]``, ``top_k_index [T, K]`` and
    ``top_k_weights [T, K]`` in this order.
    """
    found = mark_of(module)
    eager: Callable[..., torch.Tensor] = vars(type(module).forward)["__wrapped__"]
    if found is not None and found.layer is not None:
        bound = inspect.signature(eager).bind(module, *args, **kwargs)
        hidden, index, weights = list(bound.arguments.values())[1:4]
        return found.layer(hidden, index, weights, [own for of_one in found.adapters.values() for own in of_one])
    config: Any = module.config if found is None else found.config
    previous = config._experts_implementation or "eager"
    if previous == NAME:
        raise RuntimeError(
            f"experts_implementation={NAME!r} names hf_laer for a model that is not patched: leave it out, and call "
            "patch_model(model)"
        )
    return ALL_EXPERTS_FUNCTIONS.get_interface(previous, eager)(module, *args, **kwargs)
