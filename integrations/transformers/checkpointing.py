"""Activation checkpointing with a tape: every way to switch it on leads through here.

Transformers puts a ``functools.partial`` of ``torch.utils.checkpoint.checkpoint`` on each layer, through the model's
``_set_gradient_checkpointing`` whatever the public method is called and whoever wraps it; Accelerate puts
``CheckpointWrapper`` modules in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hf_laer.tape import taped

_TAPED = "_hf_laer_taped"
SWITCH = "_set_gradient_checkpointing"


def tape_model(model: nn.Module) -> None:
    """Tapes the checkpointing that is on already, and what is switched on later."""
    for module in model.modules():
        if "_gradient_checkpointing_func" in module.__dict__:
            module.__dict__["_gradient_checkpointing_func"] = _taped_function(
                module.__dict__["_gradient_checkpointing_func"]
            )
    for module in model.modules():
        # The class is asked: PEFT's wrappers answer for the model inside them, which is a module of its own here.
        if hasattr(type(module), SWITCH) and _TAPED not in module.__dict__:
            module.__dict__[SWITCH] = _TapedSwitch(module)
            module.__dict__[_TAPED] = True


def untape_model(model: nn.Module) -> None:
    """Undoes :func:`tape_model`; checkpointing that is on stays on."""
    for module in model.modules():
        if module.__dict__.pop(_TAPED, None):
            del module.__dict__[SWITCH]
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and hasattr(function, _TAPED):
            module._gradient_checkpointing_func = getattr(function, _TAPED)


def tape_checkpoint_wrappers(model: nn.Module) -> None:
    """Tapes the wrappers that Accelerate's activation checkpointing has put in."""
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.__dict__["checkpoint_fn"] = _taped_function(module.checkpoint_fn)


def compile_inside_checkpoints(model: nn.Module, **settings: Any) -> None:
    """Moves the compilation of checkpointed layers to within their wrappers.

    Accelerate compiles its wrappers. A checkpointed region in a graph can have no break, a MoE layer is one, and
    PyTorch then runs the whole layer uncompiled.

    Args:
        model: A model with Accelerate's activation checkpointing.
        **settings: What ``torch.compile`` was given.
    """
    for module in model.modules():
        if isinstance(module, CheckpointWrapper) and module._compiled_call_impl is not None:
            module._compiled_call_impl = None
            module._checkpoint_wrapped_module.compile(**settings)


class _TapedSwitch:
    """Stands for a model's ``_set_gradient_checkpointing``; a copy of the model gets a copy that switches the copy."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found = tuple(inspect.signature(getattr(type(module), SWITCH)).parameters)[1:3]
        if found != ("enable", "gradient_checkpointing_func"):
            raise RuntimeError(
                f"{type(module).__name__}.{SWITCH} of transformers {transformers.__version__} takes {found}, not what "
                "hf_laer was tested with (5.17 to 5.24): use one of these versions"
            )

    def __call__(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        """Switches with a taped function."""
        function = _taped_function(gradient_checkpointing_func) if enable else checkpoint
        switch = getattr(type(self.module), SWITCH)
        switch(self.module, enable=enable, gradient_checkpointing_func=function, **kwargs)


def _taped_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same checkpoint function with a tape for each frame.

    Raises:
        ValueError: It is reentrant.
    """
    if hasattr(function, _TAPED):
        return function
    keywords = dict(function.keywords) if isinstance(function, functools.partial) else {}
    bare = function.func if isinstance(function, functools.partial) else function
    if keywords.get("use_reentrant"):
        raise ValueError(
            "reentrant activation checkpointing runs a MoE layer's forward twice with no way to tell which plan is "
            "its own: set gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    keywords["use_reentrant"] = False
    keywords["context_fn"] = taped(keywords.get("context_fn", noop_context_fn))
    positional = function.args if isinstance(function, functools.partial) else ()
    made = functools.partial(bare, *positional, **keywords)
    setattr(made, _TAPED, function)
    return made
