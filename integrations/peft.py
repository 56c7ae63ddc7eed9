"""LoRA on the experts themselves (PEFT's ``target_parameters``, and ``all-linear``).

PEFT wraps the experts module in a ``ParamWrapper`` for each adapted parameter, one around the other, whose forward adds
the product of the adapter's factors to the stacked parameter. Here the wrapper hands the factors over instead, and the
engine applies them to the experts that are in its slots. Wrappers, names and files stay PEFT's. The factors are
ordinary parameters: FSDP2 gathers them with their layer and averages their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_laer.compute.low_rank import LowRank
from hf_laer.integrations import upstream
from hf_laer.integrations.transformers.experts import Mark, mark_of
from hf_laer.integrations.transformers.families import adapted_experts


def adopt_adapters(model: nn.Module) -> None:
    """Lets PEFT hand the factors of adapted experts to the engine; does nothing where no expert is adapted.

    Raises:
        RuntimeError: PEFT has changed (see :mod:`hf_laer.integrations.upstream`).
    """
    if adapted_experts(model):
        upstream.install("lora_activate", _activate)
        upstream.install("lora_merge", _merge)


def settle_adapters(model: nn.Module) -> None:
    """Called when FSDP2 has sharded the model: later adapters would differ between ranks.

    Raises:
        ValueError: FSDP2 would not gather an adapter's factors for the experts' forward.
    """
    for module in model.modules():
        found = mark_of(module)
        if found is not None:
            found.settled = set()
    for name, wrapper in adapted_experts(model).items():
        for part, module in wrapper.named_modules():
            if isinstance(module, FSDPModule):
                raise ValueError(f"{name}.{part}: {_UNIT_OF_ITS_OWN}")
        found = mark_of(wrapper.get_base_layer())
        if found is not None and found.settled is not None:
            found.settled |= {(wrapper.parameter_name, adapter) for adapter in wrapper.lora_A}


_UNIT_OF_ITS_OWN = (
    "FSDP2 shards the LoRA factors of experts as a unit of their own, which is not gathered for the experts. Wrap "
    "whole decoder layers: auto_wrap_policy='transformer_based_wrap'"
)


def low_rank(wrapper: Any, adapter: str) -> LowRank:
    """One adapter of one parameter, as the engine takes it.

    PEFT keeps A as ``[E * r, in]``, expert by expert, and B as ``[out, r * E]``, the expert fastest, for weights stored
    either way.

    Args:
        wrapper: A ``ParamWrapper``.
        adapter: The adapter's name.
    """
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    if isinstance(a, DTensor):
        raise RuntimeError(f"{wrapper.parameter_name}: {_UNIT_OF_ITS_OWN}")
    experts = wrapper.num_experts
    return LowRank(
        wrapper.parameter_name,
        a.view(experts, -1, a.shape[1]).transpose(1, 2),
        b.view(b.shape[0], -1, experts).permute(2, 1, 0),
        wrapper.scaling[adapter],
    )


def _activate(
    original: upstream.Function, wrapper: Any, active_adapters: Sequence[str]
) -> AbstractContextManager[None]:
    """``ParamWrapper._activate_lora``."""
    found = mark_of(wrapper.get_base_layer())
    if found is None or found.layer is None:
        return original(wrapper, active_adapters)
    return _handed_over(wrapper, found, [name for name in active_adapters if name in wrapper.lora_A])


@contextmanager
def _handed_over(wrapper: Any, found: Mark, adapters: list[str]) -> Iterator[None]:
    parameter = wrapper.parameter_name
    for adapter in adapters:
        if found.settled is not None and (parameter, adapter) not in found.settled:
            raise RuntimeError(
                f"the adapter {adapter!r} was added after accelerator.prepare, so every rank would train one of its "
                "own: add adapters before the model is prepared"
            )
    found.adapters[parameter] = [low_rank(wrapper, adapter) for adapter in adapters]
    try:
        yield
    finally:
        del found.adapters[parameter]


def _merge(original: upstream.Function, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """``ParamWrapper.merge``."""
    found = mark_of(wrapper.get_base_layer())
    if found is not None and found.engine is not None and found.engine.is_sharded:
        raise RuntimeError(
            "adapters cannot be merged into experts that are sharded over ranks: save the adapter "
            "(model.save_pretrained), load it onto the base model in one process with PeftModel.from_pretrained, and "
            "call merge_and_unload there"
        )
    original(wrapper, *args, **kwargs)
