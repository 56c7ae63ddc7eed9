"""The hook in Accelerate's FSDP2 preparation: experts out, FSDP2 over the rest, experts back in, sharded.

FSDP2 must not manage expert parameters (it would unshard every expert on every rank), nor merely ignore them
(they would miss the upcast, RAM-efficient loading, or the checkpoint). So they are gone while FSDP2 shards
the model, and come back as DTensors on FSDP2's own mesh, under their own names: Accelerate maps an
optimizer's parameters by name after that, and clipping, state dicts and fused optimizers see DTensors like
any other.

Layers that ``auto`` leaves to FSDP2 are settled first: nothing of theirs is touched then.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_laer.integrations import upstream
from hf_laer.integrations.accelerate.resume import register_state_hooks
from hf_laer.integrations.peft import adopt_adapters, settle_adapters
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.transformers.checkpointing import (
    compile_inside_checkpoints,
    tape_checkpoint_wrappers,
    tape_model,
    untape_model,
)
from hf_laer.integrations.transformers.experts import is_looped, mark, release
from hf_laer.integrations.transformers.families import adapted_experts
from hf_laer.integrations.transformers.validate import check_loader, check_model, check_state

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_laer.engine import Engine
    from hf_laer.layer import MoELayer

logger = logging.getLogger(__name__)


def install_hook() -> None:
    """Puts the hook into Accelerate, once. Models that are not patched are prepared as before.

    Raises:
        RuntimeError: Accelerate has changed (see :mod:`hf_laer.integrations.upstream`).
    """
    upstream.install("prepare", prepare_model)


def prepare_model(original: upstream.Function, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """``fsdp2_prepare_model`` for a patched model.

    Args:
        original: Accelerate's own function.
        accelerator: Whose FSDP plugin says how to shard.
        model: The model, perhaps inside PEFT's, ``torch.compile``'s or checkpoint wrappers.

    Returns:
        The model, in place, with DTensor parameters only.

    Raises:
        ValueError: The model or the setup is one that hf_laer does not work with.
    """
    engine = get_engine(model)
    if engine is None or _is_prepared(model):
        return original(accelerator, model)
    adopt_adapters(model)
    check_setup(accelerator, model)
    if engine.is_sharded:  # by patch_model(mesh=...): FSDP2 only has to leave the homes alone
        with _aside(engine):
            model = _sharded(original, accelerator, model)
    else:
        arguments = attach_arguments(accelerator, model, engine)
        dtypes = {name: arguments[name] for name in ("compute_dtype", "reduce_dtype")}
        plugin = accelerator.state.fsdp_plugin
        left = engine.settle(
            arguments["mesh"],
            **dtypes,
            leave=leavable(plugin, model, engine),
            looped=looped_layers(engine),
            checkpointed=is_checkpointed(plugin, model),
            reshard_after_forward=arguments["reshard_after_forward"],
        )
        with _left_alone(model, engine, left):
            model = _shard_around(engine, lambda: _sharded(original, accelerator, model), **arguments)
    settle_adapters(model)
    if engine.config.prefetch and engine.layers:
        prefetch_layers(model, engine)
    engine.foresight.follow(model)
    register_state_hooks(accelerator, engine)
    if engine.config.check_collectives:
        model.register_forward_pre_hook(engine.announce, prepend=True)
    _say(engine)
    return model


def _sharded(original: upstream.Function, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Accelerate's own preparation, with what the engine's layers need of checkpointing and compilation."""
    engine = get_engine(model)
    if engine is not None and engine.layers:
        tape_checkpoint_wrappers(model)
        compile_inside_checkpoints(model, **accelerator.state.dynamo_plugin.to_kwargs())
    with _one_tail(model):
        return original(accelerator, model)


def leavable(plugin: Any, model: nn.Module, engine: Engine) -> set[str]:
    """The layers that ``auto`` may leave to FSDP2, which then does to them all that the config and the plugin ask for.

    None where loads are recorded; where the config sets what only the engine does (``max_rows_per_rank``,
    ``compute_dtype``, ``reduce_dtype``; ``reshard_after_forward``, if not the plugin's); or where FSDP2 would hold more
    than two layers' experts at a time: decoder layers are no units, or stay unsharded after forward. And none with
    adapted experts: PEFT adds whole stacks there.
    """
    config = engine.config
    if engine.recorded or engine.watcher is not None:
        return set()
    bound = (config.max_rows_per_rank, config.compute_dtype, config.reduce_dtype) != (None, None, None)
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    bound = bound or config.reshard_after_forward not in (None, plugin.reshard_after_forward)
    if bound or policy is not transformer_auto_wrap_policy or not plugin.reshard_after_forward:
        return set()
    adapted = {wrapper.get_base_layer() for wrapper in adapted_experts(model).values()}
    return {name for name, layer in engine.layers.items() if layer.module not in adapted}


def is_checkpointed(plugin: Any, model: nn.Module) -> bool:
    """Whether activations are recomputed in backward, by Accelerate's wrappers or Transformers' switch."""
    switched = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return bool(getattr(plugin, "activation_checkpointing", False)) or switched


def looped_layers(engine: Engine) -> set[str]:
    """Those whose own implementation runs expert by expert."""
    return {name for name, layer in engine.layers.items() if is_looped(layer.module)}


@contextmanager
def _left_alone(model: nn.Module, engine: Engine, left: list[MoELayer]) -> Iterator[None]:
    """Gives modules that are left to FSDP2 back what they were; if sharding fails, they are the engine's again."""
    for layer in left:
        release(layer.module)
    if not engine.layers:
        untape_model(model)
    try:
        yield
    except BaseException:
        engine.take_back(left)
        for layer in left:
            mark(layer.module, layer)
        tape_model(model)
        raise


def check_setup(accelerator: Accelerator, model: nn.Module) -> None:
    """Every check for which the accelerator is needed. Raises what :mod:`validate`'s functions raise."""
    check_state(accelerator.state)
    check_model(model)
    for loader in accelerator._dataloaders:
        check_loader(loader, accelerator.num_processes)


def attach_arguments(accelerator: Accelerator, model: nn.Module, engine: Engine) -> dict[str, Any]:
    """How the plugin shards, said in the words of ``Engine.attach``.

    Returns:
        ``mesh``, ``compute_dtype``, ``reduce_dtype``, ``master_dtype``, ``src_rank``, ``offload`` and
        ``reshard_after_forward``.

    Raises:
        ValueError: Offload is on, and the process group has no back end for tensors on the CPU.
    """
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    # As Accelerate does: with 4-bit weights anywhere it neither upcasts nor loads on one rank.
    in_full = not any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    if offload:
        check_offload_group(accelerator.device)
    return {
        "mesh": fsdp_mesh(accelerator),
        "compute_dtype": policy and policy.param_dtype,
        "reduce_dtype": policy and policy.reduce_dtype,
        "master_dtype": torch.float32 if accelerator.mixed_precision != "no" and in_full else None,
        "src_rank": 0 if plugin.cpu_ram_efficient_loading and in_full else None,
        "offload": offload,
        "reshard_after_forward": bool(plugin.reshard_after_forward),
    }


def fsdp_mesh(accelerator: Accelerator) -> DeviceMesh:
    """The mesh on which FSDP2 shards: ``[shard]``, or ``[replicate, shard]`` under HSDP.

    Without a ``ParallelismConfig`` FSDP2 makes an unnamed mesh over the world; one like it compares equal, a
    named one does not, and then fused and foreach optimizers refuse to mix the two.
    """
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        return mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    return init_device_mesh(accelerator.device.type, (dist.get_world_size(),))


def check_offload_group(device: torch.device) -> None:
    """Refuses CPU offload in a process group that cannot reduce what lies on the CPU (gradient norms).

    Raises:
        ValueError: The default group has no CPU back end.
    """
    backends = dist.get_backend_config(dist.group.WORLD)
    if device.type != "cpu" and "cpu:" not in str(backends):
        raise ValueError(
            f"cpu_offload needs a process group that also serves CPU tensors, this one has {backends}. "
            "Start it with a CPU back end: "
            f"Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='cpu:gloo,{device.type}:nccl')]), "
            f"or torch.distributed.init_process_group('cpu:gloo,{device.type}:nccl') before the first "
            "Accelerator"
        )


def _is_prepared(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_orig_mod", model), FSDPModule)


def _shard_around(engine: Engine, shard: Callable[[], nn.Module], **arguments: Any) -> nn.Module:
    """Runs ``shard`` with the experts taken out; if that fails, puts them back as they were."""
    detached = engine.detach()
    try:
        model = shard()
    except BaseException:
        engine.restore(detached)
        raise
    engine.attach(detached, **arguments)
    return model


@contextmanager
def _aside(engine: Engine) -> Iterator[None]:
    """Hides the homes of an engine that is sharded already."""
    homes = engine.detach()
    try:
        yield
    finally:
        engine.restore(homes)


def _one_tail(model: nn.Module) -> AbstractContextManager[None]:
    """On torch before 2.13, keeps final norm and head in the root unit (``final_norm`` in upstream.py)."""
    if Version(torch.__version__).release >= (2, 13):
        return nullcontext()
    return _tail_in_root(model)


@contextmanager
def _tail_in_root(model: nn.Module) -> Iterator[None]:
    """Hides final norm and head, and embeddings tied to it, from the search for units of their own."""
    head, embeddings = (getattr(model, f"get_{end}_embeddings")() for end in ("output", "input"))
    tied = head is not None and embeddings is not None and head.weight is embeddings.weight
    ends = ["get_output_embeddings", "get_input_embeddings"] if tied else ["get_output_embeddings"]
    for end in ends:
        model.__dict__[end] = lambda: None
    try:
        with upstream.installed("final_norm", lambda original, model: None):
            yield
    finally:
        for end in ends:
            del model.__dict__[end]


def prefetch_layers(model: nn.Module, engine: Engine) -> None:
    """Has each decoder layer's forward send for the next one's dense parameters.

    FSDP2 does that by itself only as far as the host runs ahead of the device; here the host waits in every MoE layer,
    to know the loads. No more memory is used than when it does run ahead.
    """
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule) and unit is not model]
    experts = {layer.module for layer in engine.layers.values()}
    homes = {home.parameter for layer in engine.layers.values() for home in layer.homes.values()}
    # Accelerate's checkpoint wrappers are units too, with nothing to send for.
    units = [unit for unit in units if _has_parameters(unit, homes)]
    kinds = {type(unit) for unit in units if experts.intersection(cast(nn.Module, unit).modules())}
    layers = [unit for unit in units if type(unit) in kinds]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    model.register_forward_pre_hook(partial(_drop_unused, layers[1:]), prepend=True)


def _has_parameters(unit: FSDPModule, homes: set[nn.Parameter]) -> bool:
    """Whether FSDP shards anything in this unit that is not another unit's."""
    inner = [other for other in cast(nn.Module, unit).modules() if isinstance(other, FSDPModule) and other is not unit]
    others = homes.union(*(cast(nn.Module, other).parameters() for other in inner))
    return any(parameter not in others for parameter in cast(nn.Module, unit).parameters())


@torch.compiler.disable
def _drop_unused(layers: Sequence[FSDPModule], *_: Any) -> None:
    """Before the model's forward: what a forward that ended early sent for is not to be used after an optimizer's step.

    FSDP2 drops it after a backward only.
    """
    for layer in layers:
        if _is_sent_for(layer):
            layer.unshard()
            layer.reshard()


def _is_sent_for(layer: FSDPModule) -> bool:
    state = layer._get_fsdp_state()
    # torch 2.11 knows one group of a unit.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(getattr(group, "_all_gather_result", None) is not None for group in groups)


def _say(engine: Engine) -> None:
    if dist.get_rank() == 0:
        kinds = Counter((choice.strategy, choice.reason) for choice in engine.choices.values())
        for (strategy, reason), count in kinds.items():
            logger.info("%d MoE layers run as %s on %s (%s)", count, strategy, engine.mesh, reason)
        if not engine.layers:
            logger.info("auto left every MoE layer to FSDP2: hf_laer takes no part in this run")
