"""Every monkey-patch of the Hugging Face stack, in one list.

Accelerate, Transformers and PEFT have no hook at some places that hf_laer needs. Each :class:`Patch` below says
what it changes, why, what upstream must look like, and the versions that were read and run. A patch is
installed when first needed, never by an import, and once only; where upstream no longer looks as expected,
the error names the versions.

Beside these, one private method is replaced on the user's own model object, not in Transformers:
``_set_gradient_checkpointing``, in ``transformers/checkpointing.py``, which checks its parameters likewise.
And three private parts of PyTorch are used: the constructor of ``DTensor`` with its ``_spec``, as FSDP2 uses them, in
``hf_laer/shard/home.py``; ``_all_gather_result`` of an FSDP2 unit, in ``accelerate/hook.py``; and the module
``torch.distributed._symmetric_memory`` (``empty``, ``rendezvous``, the handle's ``get_buffer`` and ``barrier``), in
``hf_laer/comm/arena.py``, without which ``peer_memory=False`` does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

Function = Callable[..., Any]
_MARK = "_hf_laer_patch"


@dataclass(frozen=True)
class Patch:
    """One function of another package that hf_laer replaces.

    Args:
        name: How this file's users ask for it.
        package: The distribution whose version decides whether the patch fits.
        target: ``module:qualified.name`` of the function.
        parameters: The function's parameters, in order, as hf_laer calls and replaces them.
        caller: ``module:qualified.name`` of the code that must look the target up by name, or ``""`` where
            the target is a method, which is looked up anyway. A caller that imported it otherwise would not
            see the patch.
        checked: The versions on which the patch was tested.
        does: What the replacement changes.
        why: Why no public hook serves.
    """

    name: str
    package: str
    target: str
    parameters: tuple[str, ...]
    caller: str
    checked: str
    does: str
    why: str


_OF_STATE = (
    *("self", "mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "parallelism_config", "_from_accelerator", "kwargs"),
)
PATCHES = {
    patch.name: patch
    for patch in (
        Patch(
            name="prepare",
            package="accelerate",
            target="accelerate.accelerator:fsdp2_prepare_model",
            parameters=("accelerator", "model"),
            caller="accelerate.accelerator:Accelerator._prepare_fsdp2",
            checked="1.15",
            does="takes a patched model's expert parameters out before FSDP2 shards it, and attaches them sharded",
            why="FSDP2 would shard the experts itself; the optimizer is mapped by name right after this "
            "function, so parameters may be exchanged inside it and nowhere else",
        ),
        Patch(
            name="cpu_fsdp",
            package="accelerate",
            target="accelerate.state:AcceleratorState.__init__",
            parameters=_OF_STATE,
            caller="",
            checked="1.15",
            does="takes the FSDP plugin also where the processes run on CPUs",
            why="the list of distributed types that may become FSDP has every device but the CPU",
        ),
        Patch(
            name="alone",
            package="accelerate",
            target="accelerate.state:AcceleratorState.__init__",
            parameters=_OF_STATE,
            caller="",
            checked="1.15",
            does="refuses a LaerFSDPPlugin in one of several processes that do not know of each other, and warns where "
            "it takes no part",
            why="where Accelerate sees one process it drops the plugin without a word, and calls nothing of it again",
        ),
        Patch(
            name="final_norm",
            package="accelerate",
            target="accelerate.utils.fsdp_utils:_find_final_norm",
            parameters=("model",),
            caller="accelerate.utils.fsdp_utils:fsdp2_prepare_model",
            checked="1.15",
            does="finds no final norm, so that norm and head stay in FSDP2's root unit (torch before 2.13 only)",
            why="TRL's fused head reads the head's weight and never calls its forward, so the unit of norm and "
            "head never ends a forward; torch before 2.13 does not unshard it again after an evaluation and a "
            "checkpoint, and mixes Tensor with DTensor",
        ),
        Patch(
            name="last_checkpoint",
            package="transformers",
            target="transformers.trainer:get_last_checkpoint",
            parameters=("folder",),
            caller="transformers.trainer:Trainer.train",
            checked="5.17, 5.24",
            does="lets resume_from_checkpoint=True pass over checkpoints whose save was cut short",
            why="Trainer writes checkpoints in place, takes the one with the highest number, whole or not, and has no "
            "event between finding and loading it",
        ),
        Patch(
            name="log",
            package="transformers",
            target="transformers.trainer_callback:CallbackHandler.on_log",
            parameters=("self", "args", "state", "control", "logs", "kwargs"),
            caller="",
            checked="5.17, 5.24",
            does="lets LaerCallback add its numbers before any other callback sees the logs",
            why="reporters (TensorBoard, W&B) come before a user's callbacks in the list and report first",
        ),
        Patch(
            name="lora_activate",
            package="peft",
            target="peft.tuners.lora.layer:ParamWrapper._activate_lora",
            parameters=("self", "active_adapters"),
            caller="peft.tuners.lora.layer:ParamWrapper.forward",
            checked="0.21",
            does="hands the factors of adapted experts to the engine, where a patched model's experts are adapted",
            why="PEFT makes the sum of weight and addition for the whole stack of experts, which no rank has",
        ),
        Patch(
            name="lora_merge",
            package="peft",
            target="peft.tuners.lora.layer:ParamWrapper.merge",
            parameters=("self", "safe_merge", "adapter_names"),
            caller="",
            checked="0.21",
            does="refuses to merge into experts that are sharded over ranks",
            why="PEFT would add a plain tensor to a DTensor and fail with torch's words for it",
        ),
    )
}


def install(name: str, wrapper: Function) -> None:
    """Replaces a target for good; a second call with the same name does nothing.

    Args:
        name: A key of :data:`PATCHES`.
        wrapper: Called as ``wrapper(original, *args, **kwargs)`` in the target's place.

    Raises:
        RuntimeError: The target is not what ``name``'s patch was written for.
    """
    patch = PATCHES[name]
    holder, attribute = _resolve(patch.target, patch)
    original = getattr(holder, attribute)
    if is_installed(name):
        return
    check(name)
    setattr(holder, attribute, _wrapped(name, original, wrapper))


@contextmanager
def installed(name: str, wrapper: Function) -> Iterator[None]:
    """Replaces a target within a ``with`` block; arguments and errors are those of :func:`install`."""
    patch = PATCHES[name]
    holder, attribute = _resolve(patch.target, patch)
    original = getattr(holder, attribute)
    check(name)
    setattr(holder, attribute, _wrapped(name, original, wrapper))
    try:
        yield
    finally:
        setattr(holder, attribute, original)


def is_installed(name: str) -> bool:
    """Whether the target is replaced now."""
    patch = PATCHES[name]
    holder, attribute = _resolve(patch.target, patch)
    return name in getattr(getattr(holder, attribute), _MARK, ())


def check(name: str) -> None:
    """Compares the installed package with what the patch was written for.

    Raises:
        RuntimeError: The target is gone, takes other parameters, or is no longer called by name; the message
            has the installed and the tested versions.
    """
    patch = PATCHES[name]
    holder, attribute = _resolve(patch.target, patch)
    found = tuple(inspect.signature(getattr(holder, attribute)).parameters)
    if found != patch.parameters:
        raise _changed(patch, f"{patch.target} takes ({', '.join(found)}), not ({', '.join(patch.parameters)})")
    if patch.caller:
        caller_holder, caller = _resolve(patch.caller, patch)
        code = inspect.unwrap(getattr(caller_holder, caller)).__code__
        if attribute not in code.co_names:
            raise _changed(patch, f"{patch.caller} no longer calls {attribute}")


def _wrapped(name: str, original: Function, wrapper: Function) -> Function:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    # Two patches may replace one target, one around the other.
    setattr(replacement, _MARK, (*getattr(original, _MARK, ()), name))
    return replacement


def _resolve(path: str, patch: Patch) -> tuple[Any, str]:
    """The object that holds the function named by ``path``, and its attribute there."""
    module, _, qualified = path.partition(":")
    *holders, attribute = qualified.split(".")
    try:
        holder: Any = importlib.import_module(module)
        for part in holders:
            holder = getattr(holder, part)
        getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise _changed(patch, f"{path} is gone") from error
    return holder, attribute


def _changed(patch: Patch, what: str) -> RuntimeError:
    return RuntimeError(
        f"hf_laer needs {patch.target}, which {patch.package} {version(patch.package)} has changed: {what}. "
        f"Tested with {patch.package} {patch.checked}: install one of these, or a newer hf_laer"
    )
