"""Refuses the wrappers that would train a patched model wrongly, when they are put round it rather than in a step.

PyTorch's hook for registered submodules sees every wrapper, whoever makes it: ``accelerator.prepare``, Transformers'
Trainer (``DataParallel`` where one process sees several GPUs), or a script.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hf_laer.integrations.transformers.experts import mark_of

# By name, so that nothing is imported for it.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
_watching: list[object] = []


def watch_wrappers() -> None:
    """Starts to watch; calling it again changes nothing."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_refuse))


def _refuse(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by PyTorch for every module that becomes another's.

    Raises:
        ValueError: ``parent`` is such a wrapper, and a module in ``child`` runs in an engine.
    """
    kinds = {kind.__name__ for kind in type(parent).__mro__} & _WRAPPERS
    if not kinds or child is None:
        return
    marks = (mark_of(module) for module in child.modules())
    if any(found is not None and found.engine is not None for found in marks):
        raise ValueError(
            f"{kinds.pop()} cannot hold a model that hf_laer has patched: experts are sharded beside FSDP2 "
            "(fully_shard). Give Accelerator(fsdp_plugin=LaerFSDPPlugin()), or fsdp=True with "
            "fsdp_config={'version': 2} in the training arguments; without Accelerate "
            "fully_shard(model, ignored_params=expert_parameters(model)) after patch_model(model, mesh=mesh). On one "
            "device none is needed: start one process for each GPU"
        )
