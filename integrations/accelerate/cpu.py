"""FSDP2 on CPUs: what Accelerate offers on every device but this one."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hf_laer.integrations import upstream


def enable_cpu_fsdp() -> None:
    """Lets an ``Accelerator`` with an FSDP plugin use it where the processes run on CPUs (gloo).

    Call it before the first ``Accelerator`` or ``Trainer`` is made. It changes nothing where there is a GPU.

    Raises:
        RuntimeError: Accelerate has changed (see :mod:`hf_laer.integrations.upstream`), or already holds a
            state that says "CPU processes, no FSDP".
    """
    made = AcceleratorState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU
    if made and not upstream.is_installed("cpu_fsdp"):
        raise RuntimeError("an Accelerator exists already: call enable_cpu_fsdp() before the first one is made")
    upstream.install("cpu_fsdp", _take_fsdp_plugin)


def _take_fsdp_plugin(original: upstream.Function, state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """``AcceleratorState.__init__``, which for CPU processes forgets the FSDP plugin that it is given."""
    fresh = not AcceleratorState._shared_state
    original(state, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if not fresh or plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    # Both states hold the type, and Accelerate compares them to tell whether one is already made.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
