"""``patch_model``: one line that makes the MoE blocks of a Transformers model run in hf_laer's engine."""

from __future__ import annotations

import logging

from accelerate.state import PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin

from hf_laer.comm.groups import ranks_of_node
from hf_laer.config import LaerConfig
from hf_laer.engine import Engine
from hf_laer.integrations.transformers.checkpointing import tape_model, untape_model
from hf_laer.integrations.transformers.experts import mark, mark_of, register, unmark
from hf_laer.integrations.transformers.families import experts_modules, spec_of
from hf_laer.integrations.transformers.optimizers import follow
from hf_laer.integrations.transformers.validate import check_model, check_processes
from hf_laer.integrations.transformers.wrappers import watch_wrappers

logger = logging.getLogger(__name__)


def patch_model(model: nn.Module, config: LaerConfig | None = None, *, mesh: DeviceMesh | None = None) -> nn.Module:
    """Makes the model's experts run in expert parallel, in place. Classes, names and shapes stay as they are.

    Parameters are sharded when Accelerate prepares the model under FSDP2, or at once where ``mesh`` is given. Under
    FSDP2 ``auto`` may leave layers to it, as if they had not been patched; with ``mesh`` it does not. With neither, and
    no process group, the model runs on one device. An optimizer may be made before or after.

    Args:
        model: A Transformers model with MoE layers on the experts interface; with PEFT's LoRA too, on experts or
            elsewhere.
        config: Strategy and settings; ``None`` means the defaults.
        mesh: The FSDP mesh, 1-D or (replicate, shard), for use without Accelerate.

    Returns:
        The model.

    Raises:
        ValueError: The model has no such layer, or something in it cannot be patched; or Accelerate, set up already,
            sees one process where the launcher started several. The message names the cure.
        RuntimeError: It is patched otherwise already, or was prepared before it was patched.

    From then on ``DistributedDataParallel``, ``DataParallel``, FSDP version 1 and DeepSpeed refuse to wrap the model.
    """
    config = config or LaerConfig()
    engine = get_engine(model)
    if engine is not None:
        return _patched_again(model, engine, config, mesh)
    check_model(model)
    if mesh is None:
        _check_processes()
    modules = experts_modules(model)
    for name, module in modules.items():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise RuntimeError(
                f"{name} is sharded already: call patch_model before accelerator.prepare (or fully_shard), not after"
            )
    specs = {name: spec_of(name, module) for name, module in modules.items()}
    engine = Engine(config, config.ranks_per_node or ranks_of_node())
    register()
    watch_wrappers()
    tape_model(model)
    for name, module in modules.items():
        mark(module, engine.add_layer(name, module, specs[name]))
    # Here, because these parts need this one.
    from hf_laer.integrations.accelerate.hook import install_hook
    from hf_laer.integrations.peft import adopt_adapters

    install_hook()
    adopt_adapters(model)
    if mesh is not None:
        _shard_now(model, engine, mesh)
    logger.info("hf_laer runs %d MoE layers of %s with %s", len(modules), type(model).__name__, config.strategy)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Gives the plain model back, in place; a model that is not patched is left alone.

    After ``accelerator.prepare`` that is possible only where ``auto`` has left every layer to FSDP2.

    Raises:
        RuntimeError: Its parameters are sharded; ``accelerator.get_state_dict`` gathers them.
    """
    engine = get_engine(model)
    if engine is None:
        return model
    if engine.is_sharded and engine.layers:
        raise RuntimeError(
            "the experts are sharded over ranks and cannot be put back: gather the weights with "
            "accelerator.get_state_dict(model) and load them into a fresh model"
        )
    for module in model.modules():
        unmark(module)
    untape_model(model)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether the model has an engine: ``patch_model`` was called, though ``auto`` may leave its layers to FSDP2."""
    return get_engine(model) is not None


def get_engine(model: nn.Module) -> Engine | None:
    """The model's engine; wrappers (PEFT, compile, checkpoint) make no difference."""
    for module in model.modules():
        found = mark_of(module)
        if found is not None and found.engine is not None:
            return found.engine
    return None


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that the engine shards: what ``fully_shard(ignored_params=…)`` takes.

    Those of layers that ``auto`` has left to FSDP2 are not among them.
    """
    engine = get_engine(model)
    if engine is None:
        raise ValueError("the model is not patched: call patch_model first")
    return {home.parameter for layer in engine.layers.values() for home in layer.homes.values()}


def _check_processes() -> None:
    """Where Accelerate is set up already, it must not think itself alone."""
    if PartialState._shared_state:
        check_processes(PartialState())


def _patched_again(model: nn.Module, engine: Engine, config: LaerConfig, mesh: DeviceMesh | None) -> nn.Module:
    if engine.config != config:
        raise RuntimeError(
            f"the model is patched already, with {engine.config}, and cannot also have {config}: patch once, or call "
            "unpatch_model(model) before it is prepared"
        )
    if mesh is not None and not engine.is_sharded:
        _shard_now(model, engine, mesh)
    elif mesh is not None and engine.mesh != mesh:
        raise RuntimeError(f"the model is sharded already, on {engine.mesh}, and cannot also be on {mesh}")
    return model


def _shard_now(model: nn.Module, engine: Engine, mesh: DeviceMesh) -> None:
    """Shards at once; an optimizer that was made before follows. A failure leaves the plain model."""
    detached = engine.detach()
    before = [(name, key, old) for name, own in detached.parameters.items() for key, old in own.items()]
    try:
        engine.attach(detached, mesh)
    except ValueError:
        unpatch_model(model)
        raise
    engine.foresight.follow(model)
    follow([(old, engine.layers[name].homes[key].parameter) for name, key, old in before])
    for part in model.modules():
        if isinstance(part, GenerationMixin):
            # As fully_shard does: generate() then lets no rank stop before the others do.
            part.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
