"""What hf_laer does not work with, said before training: each check names the setting and the cure.

Pure functions of what they are given. ``patch_model`` calls :func:`check_model`; the hook in Accelerate's
preparation :func:`check_state`, :func:`check_model` and :func:`check_loader`; the Trainer's callback
those and :func:`check_arguments`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import get_int_from_env
from torch import nn
from torch.distributed.tensor import DTensor

from hf_laer.integrations.transformers.families import ADAPTED, adapted_experts, is_experts

# Where launchers say how many processes they started.
_LAUNCHED = ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE"]
_QUANTIZED_CLASSES = ("Mxfp4GptOssExperts", "FP8Experts")
_QUANTIZED_PARAMETERS = ("Params4bit", "Int8Params")
_MOE_NAMES = re.compile(r"experts|sparsemlp|moe(block)?$", re.IGNORECASE)


def check_model(model: nn.Module) -> None:
    """Refuses a model whose experts cannot be run, or that something else parallelizes or replaces.

    Args:
        model: A Transformers model, bare or wrapped (PEFT, ``torch.compile``), not yet prepared.

    Raises:
        ValueError: Native parallelism (``DistributedConfig``, TP, EP), quantized experts, hub kernels,
            Liger's experts, reentrant checkpointing, adapters on experts' biases or merged ones, experts that share
            parameters, a family off Transformers' experts interface, or no MoE layer.
    """
    _check_native_parallelism(model)
    _check_quantized(model)
    _check_swapped(model)
    _check_reentrant(model)
    _check_adapted(model)
    _check_shared(model)
    if not any(is_experts(module) for module in model.modules()):
        raise ValueError(_no_experts(model))


def _check_adapted(model: nn.Module) -> None:
    """LoRA on the experts' weights works; the rest would be left out, or trained without effect."""
    for name, wrapper in adapted_experts(model).items():
        if wrapper.parameter_name not in ADAPTED:
            raise ValueError(
                f"{name} adapts {wrapper.parameter_name}: hf_laer runs LoRA on the experts' weights "
                f"({', '.join(ADAPTED)}), not on their biases. Take it out of target_parameters"
            )
        if wrapper.merged:
            raise ValueError(
                f"{name} has merged adapters ({', '.join(wrapper.merged_adapters)}): call model.unmerge_adapter() to "
                "train them on, or model.merge_and_unload() to be rid of them, before patch_model"
            )


def _check_shared(model: nn.Module) -> None:
    """Sharding would make two parameters of one."""
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False) if is_experts(module) else ():
            other = seen.setdefault(id(parameter), f"{name}.{key}")
            if other != f"{name}.{key}":
                raise ValueError(
                    f"{name}.{key} and {other} are one parameter: experts that share parameters are not supported; "
                    "give each layer its own"
                )


def check_state(state: Any) -> None:
    """Refuses what is not FSDP version 2, or not FSDP alone, where there are several processes.

    Args:
        state: An ``AcceleratorState``.

    Raises:
        ValueError: DDP, DeepSpeed, Megatron, FSDP version 1, TP, CP or SP, or several processes that do not
            know of each other.
    """
    _check_parallelism(getattr(state, "parallelism_config", None))
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind == "NO":
        check_processes(state)
    elif kind != "FSDP":
        raise ValueError(
            f"Accelerate's distributed_type is {kind}: hf_laer shards the experts inside FSDP2. Set "
            "distributed_type: FSDP with fsdp_version: 2, Accelerator(fsdp_plugin=LaerFSDPPlugin()), or "
            "fsdp=True with fsdp_config={'version': 2} in the training arguments; on CPUs also call "
            "hf_laer.integrations.accelerate.enable_cpu_fsdp() first; or give patch_model a mesh"
        )
    elif state.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version={state.fsdp_plugin.fsdp_version}: FSDP version 1 flattens the experts into one "
            "tensor. Set fsdp_version: 2 (fsdp_config={'version': 2} in the training arguments, "
            "FullyShardedDataParallelPlugin(fsdp_version=2) in code)"
        )


def check_processes(state: Any) -> None:
    """Refuses one of several processes that do not know of each other: each would train alone, and none would say so.

    Args:
        state: A ``PartialState`` or ``AcceleratorState``.

    Raises:
        ValueError: The launcher started several processes, and Accelerate sees one.
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    started = max(get_int_from_env(_LAUNCHED, 1), torch.distributed.get_world_size() if joined else 1)
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind == "NO" and started > 1:
        raise ValueError(
            f"Accelerate's distributed_type is NO in one of {started} processes: each would train alone. Where there "
            "is no GPU, ask for the CPU: Accelerator(cpu=True), or use_cpu=True in the training arguments (--use_cpu "
            "true); where there are GPUs, start the processes by accelerate launch or torchrun, which set LOCAL_RANK"
        )


def check_arguments(arguments: Any) -> None:
    """Refuses training arguments under which the Trainer would later change the model.

    Args:
        arguments: ``TrainingArguments`` or a subclass.

    Raises:
        ValueError: Reentrant checkpointing, or Liger kernels for the experts.
    """
    checkpointing = getattr(arguments, "gradient_checkpointing", False)
    checkpointing = checkpointing or getattr(arguments, "activation_checkpointing", False)
    kwargs = getattr(arguments, "gradient_checkpointing_kwargs", None)
    kwargs = kwargs or getattr(arguments, "activation_checkpointing_kwargs", None) or {}
    if checkpointing and kwargs.get("use_reentrant"):
        raise ValueError(_REENTRANT)
    liger = getattr(arguments, "liger_kernel_config", None) or {}
    if getattr(arguments, "use_liger_kernel", False) and liger.get("swiglu", True):
        raise ValueError(_LIGER)


def check_sharded(model: nn.Module) -> None:
    """Refuses trained parameters that are not sharded in a model that is: each rank would train its own.

    Args:
        model: A prepared model.

    Raises:
        ValueError: A trained parameter was added after the model was prepared.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is trained and not sharded, so every rank would train one of its own: add adapters and other "
                "modules before the model is prepared (peft_config=..., or get_peft_model before the trainer is made)"
            )


def check_loader(loader: Any, ranks: int) -> None:
    """Refuses a prepared data loader that gives ranks different numbers of batches.

    Accelerate hands whole shards of a ``datasets.IterableDataset`` to ranks when there are enough of them. A
    rank whose shards end first stops, and the others wait for its tokens.

    Args:
        loader: What ``accelerator.prepare`` made of a ``DataLoader``.
        ranks: Processes that share the data.

    Raises:
        ValueError: The data set is split by shards and ends.
    """
    dataset = getattr(loader, "dataset", None)
    dispatched = type(loader).__name__ == "DataLoaderDispatcher"
    if ranks < 2 or dispatched or not _is_hub_stream(dataset) or _repeats(dataset):
        return
    raise ValueError(
        f"the iterable data set has as many shards as there are ranks ({ranks}) or more, so each rank reads "
        "its own and gets its own number of batches: the others would wait for it forever. Use "
        "dataset.repeat(None) with max_steps, fewer shards than ranks (to_iterable_dataset(num_shards=1)), "
        "or a map-style data set"
    )


_REENTRANT = (
    "use_reentrant=True: reentrant checkpointing runs the routers again in another order. Set "
    "gradient_checkpointing_kwargs={'use_reentrant': False}"
)
_LIGER = (
    "use_liger_kernel=True replaces the experts' forward. Set use_liger_kernel=False, or keep Liger's other "
    "kernels with liger_kernel_config={'swiglu': False}"
)


def _check_native_parallelism(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        planned = getattr(config, "distributed_config", None) is not None or getattr(module, "_tp_size", None)
        if planned or getattr(module, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "the model was loaded with DistributedConfig (or tp_plan): Transformers has already split "
                "it over the ranks. Load it without distributed_config, tp_plan, tp_size and device_mesh"
            )
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(
                "the experts already run in Transformers' own expert parallelism. Load the model without "
                "enable_expert_parallel and ep_size"
            )


def _check_quantized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any(kind.startswith(quantized) for quantized in _QUANTIZED_CLASSES):
            raise ValueError(_quantized(name, kind))
        if not is_experts(module):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            narrow = parameter.dtype.itemsize == 1 or not parameter.dtype.is_floating_point
            if narrow or type(parameter).__name__ in _QUANTIZED_PARAMETERS:
                raise ValueError(_quantized(f"{name}.{key}", f"{type(parameter).__name__} of {parameter.dtype}"))


def _quantized(name: str, what: str) -> str:
    return (
        f"the experts are quantized ({name} is {what}) and cannot be trained or re-laid out. Load them in "
        "bf16: quantization_config=Mxfp4Config(dequantize=True) for MXFP4 (gpt-oss), "
        "FineGrainedFP8Config(dequantize=True) for FP8, and llm_int8_skip_modules=['experts'] or no "
        "quantization_config for bitsandbytes"
    )


def _check_swapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "_use_kernels", False):
            raise ValueError(
                "use_kernels=True replaces the MoE layers by kernels from the hub. Load the model with "
                "use_kernels=False"
            )
        if _is_moe_like(module) and _forward_module(module).startswith("liger_kernel"):
            raise ValueError(f"Liger has replaced {name or 'the model'}: {_LIGER}")


def _forward_module(module: nn.Module) -> str:
    """The Python module in which the forward that ``module`` runs was written."""
    forward = module.__dict__.get("forward")
    return getattr(getattr(forward, "__func__", forward), "__module__", None) or type(module).__module__


def _check_reentrant(model: nn.Module) -> None:
    for module in model.modules():
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None) or {}
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
            raise ValueError(_REENTRANT)


def _is_moe_like(module: nn.Module) -> bool:
    return is_experts(module) or _MOE_NAMES.search(type(module).__name__) is not None


def _no_experts(model: nn.Module) -> str:
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    blocks = sorted({type(module).__name__ for module in _children(model) if _is_moe_like(module)})
    if blocks:
        return (
            f"the MoE layers of {family} ({', '.join(blocks)}) are not on Transformers' experts interface, "
            "through which hf_laer runs experts. Use a family that is (mixtral, qwen2_moe, qwen3_moe, "
            "gpt_oss, deepseek_v3, olmoe, ...), or a Transformers version in which this one is"
        )
    return (
        f"{family} has no MoE layer, so there is nothing to balance. Load a Mixture-of-Experts model, or "
        "train this one without hf_laer"
    )


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Every module below ``model`` that is no whole model itself (whose class name may say MoE)."""
    return (module for module in model.modules() if not hasattr(module, "save_pretrained"))


def _check_parallelism(config: Any) -> None:
    if config is None:
        return
    for name, what in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
        if getattr(config, f"{name}_size", 1) not in (None, 1):
            raise ValueError(
                f"ParallelismConfig({name}_size={getattr(config, f'{name}_size')}): hf_laer does not work "
                f"with {what} parallelism. Set {name}_size=1 and give the ranks to dp_shard_size or "
                "dp_replicate_size"
            )


def _is_hub_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is a ``datasets.IterableDataset`` (Accelerate wraps other iterable data sets)."""
    return any(f"{kind.__module__}.{kind.__name__}" == _HUB_STREAM for kind in type(dataset).__mro__)


_HUB_STREAM = "datasets.iterable_dataset.IterableDataset"


def _repeats(dataset: Any) -> bool:
    """Whether the data set was made endless by ``repeat(None)``."""
    source = getattr(dataset, "_ex_iterable", None)
    while source is not None:
        if type(source).__name__ == "RepeatExamplesIterable" and source.num_times is None:
            return True
        source = getattr(source, "ex_iterable", None)
    return False
