"""``LaerFSDPPlugin``: Accelerate's FSDP plugin, version 2, with a ``LaerConfig`` in it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_laer.config import LaerConfig
from hf_laer.integrations import upstream
from hf_laer.integrations.accelerate.cpu import enable_cpu_fsdp
from hf_laer.integrations.accelerate.hook import install_hook
from hf_laer.integrations.transformers import patch_model
from hf_laer.integrations.transformers.validate import check_processes

logger = logging.getLogger(__name__)


@dataclass
class LaerFSDPPlugin(FullyShardedDataParallelPlugin):
    """An FSDP plugin that patches the model which ``Accelerator.prepare(model, optimizer)`` is given.

    Args:
        laer: How the MoE layers run; ``None`` means ``LaerConfig()``. A model that is patched already must
            have been patched with an equal config.

    The other fields are Accelerate's, with its defaults, except that the version is 2 and layers are wrapped
    one by one (``transformer_based_wrap``) unless told otherwise. As in Accelerate, a field that is not given
    is read from the launcher's ``FSDP_*`` variables. Processes on CPUs train under FSDP2 too
    (:func:`~hf_laer.integrations.accelerate.enable_cpu_fsdp`).

    Raises:
        ValueError: ``fsdp_version`` is 1. ``Accelerator`` raises one where the launcher started several processes and
            Accelerate sees one.
        RuntimeError: An ``Accelerator`` on CPUs was made before.

    Example::

        accelerator = Accelerator(fsdp_plugin=LaerFSDPPlugin(laer=LaerConfig(strategy="fsep")))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    laer: LaerConfig | None = None

    def __post_init__(self) -> None:
        """Fills in what was not given; Accelerate fills in and validates the rest."""
        version, wrapping = getattr(self, "fsdp_version", None), getattr(self, "auto_wrap_policy", None)
        if version not in (None, 2):
            raise ValueError(f"LaerFSDPPlugin needs fsdp_version=2, got {version}")
        self.fsdp_version = 2
        self.laer = self.laer or LaerConfig()
        super().__post_init__()
        if wrapping is None and getattr(self, "auto_wrap_policy", None) is None:  # the launcher names none
            self.auto_wrap_policy = transformer_auto_wrap_policy
        install_hook()
        # So that processes on CPUs do not train as DDP, without a word and unpatched.
        enable_cpu_fsdp()
        upstream.install("alone", _refuse_alone)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Patches ``model``, then finds its layers.

        This is where Accelerate first shows the plugin the model, before checkpoint and compile wrappers hide
        it. Accelerate calls it twice; ``patch_model`` does nothing the second time.
        """
        patch_model(model, self.laer)
        super().set_auto_wrap_policy(model)


def _refuse_alone(original: upstream.Function, state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """``AcceleratorState.__init__``, which drops the plugin where it sees but one process."""
    original(state, *args, **kwargs)
    if not isinstance(kwargs.get("fsdp_plugin"), LaerFSDPPlugin):
        return
    check_processes(state)
    if state.distributed_type != DistributedType.FSDP:
        logger.warning(
            "Accelerate's distributed_type is %s: LaerFSDPPlugin takes no part, and the model is not patched",
            state.distributed_type.value,
        )
