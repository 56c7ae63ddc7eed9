"""Everything hf_laer does not work with is refused before training, by an error that names the cure."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from datasets import Dataset
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, TrainerState, TrainingArguments
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from hf_laer import LaerConfig, patch_model
from hf_laer.integrations import upstream
from hf_laer.integrations.accelerate import LaerFSDPPlugin, enable_cpu_fsdp
from hf_laer.integrations.accelerate.hook import check_offload_group
from hf_laer.integrations.bench.fresh import fresh_accelerate
from hf_laer.integrations.transformers.validate import (
    check_arguments,
    check_loader,
    check_model,
    check_state,
)
from hf_laer.integrations.trl import LaerCallback
from tests.integrations import cases, cases_trl
from tests.models import tiny_model


def small(family: str, **settings: Any) -> nn.Module:
    """A model of a family that tests.models does not make."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | settings))


def refused(model: nn.Module, *words: str) -> None:
    """``patch_model`` refuses the model with a message that has all the words."""
    with pytest.raises(ValueError, match=words[0]) as caught:
        patch_model(model)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_no_moe_layer() -> None:
    refused(small("llama", intermediate_size=16), "llama has no MoE layer", "Load a Mixture-of-Experts model")


def test_family_off_the_interface() -> None:
    model = small("jetmoe", intermediate_size=16, num_local_experts=2, num_key_value_heads=1, kv_channels=8)
    refused(model, "jetmoe", "JetMoeParallelExperts", "not on Transformers' experts interface", "mixtral")


def test_no_moe_layer_left() -> None:
    refused(tiny_model("qwen3_moe", mlp_only_layers=[0, 1]), "qwen3_moe has no MoE layer")


def test_mxfp4_experts() -> None:
    model = tiny_model("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts = Mxfp4GptOssExperts(model.config)
    refused(model, "Mxfp4GptOssExperts", "Mxfp4Config(dequantize=True)")


def test_fp8_experts() -> None:
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    narrow = experts.gate_up_proj.detach().to(torch.float8_e4m3fn)
    experts.gate_up_proj = nn.Parameter(narrow, requires_grad=False)
    refused(model, "layers.1.mlp.experts.gate_up_proj", "float8_e4m3fn", "FineGrainedFP8Config(dequantize=True)")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=["4bit", "8bit"])
def test_bitsandbytes_experts(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(torch.zeros(8, 1, dtype=dtype), requires_grad=False)
    refused(model, "down_proj", "llm_int8_skip_modules=['experts']")


def test_hub_kernels() -> None:
    model = tiny_model("qwen3_moe")
    model._use_kernels = True
    refused(model, "use_kernels=True", "use_kernels=False")


def test_liger_experts() -> None:
    def forward(self: nn.Module, *args: Any) -> None: ...

    forward.__module__ = "liger_kernel.transformers.swiglu"
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    experts.forward = forward.__get__(experts)
    refused(model, "Liger", "layers.0.mlp.experts", "use_liger_kernel=False", "'swiglu': False")


def test_reentrant_checkpointing_that_is_on() -> None:
    model = tiny_model("qwen3_moe")
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
    refused(model, "use_reentrant=True", "{'use_reentrant': False}")


def test_distributed_config() -> None:
    model = tiny_model("qwen3_moe")
    model.config.distributed_config = SimpleNamespace(ep_size=2)
    refused(model, "DistributedConfig", "without distributed_config")


def test_experts_in_transformers_own_expert_parallelism() -> None:
    model = tiny_model("qwen3_moe")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    refused(model, "expert parallelism", "ep_size")


def test_ordinary_models_pass() -> None:
    for family in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"):
        check_model(tiny_model(family))


def test_two_conflicting_patches() -> None:
    model = patch_model(tiny_model("qwen3_moe"), LaerConfig(strategy="fsep"))
    assert patch_model(model, LaerConfig(strategy="fsep")) is model
    with pytest.raises((ValueError, RuntimeError), match=r"patched already.*unpatch_model"):
        patch_model(model, LaerConfig(strategy="llep"))


def state(kind: DistributedType, version: int = 2, **sizes: int) -> Any:
    """As much of an ``AcceleratorState`` as is looked at."""
    return SimpleNamespace(
        distributed_type=kind,
        fsdp_plugin=SimpleNamespace(fsdp_version=version),
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
    )


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "MEGATRON_LM"])
def test_not_under_fsdp(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"distributed_type is {kind}.*fsdp_version: 2.*mesh"):
        check_state(state(DistributedType(kind)))


def test_fsdp_version_1() -> None:
    with pytest.raises(ValueError, match=r"fsdp_version=1.*fsdp_version: 2"):
        check_state(state(DistributedType.FSDP, version=1))
    with pytest.raises(ValueError, match="needs fsdp_version=2"):
        LaerFSDPPlugin(fsdp_version=1)


@pytest.mark.parametrize("dimension", ["tp", "cp", "sp"])
def test_other_parallelism(dimension: str) -> None:
    with pytest.raises(ValueError, match=rf"{dimension}_size=2.*dp_shard_size"):
        check_state(state(DistributedType.FSDP, **{f"{dimension}_size": 2}))


def test_fsdp2_and_one_process_pass() -> None:
    check_state(state(DistributedType.FSDP))
    check_state(state(DistributedType.FSDP, dp_replicate_size=2, dp_shard_size=2))
    check_state(state(DistributedType.NO))


def test_arguments(tmp_path) -> None:
    def arguments(**settings: Any) -> TrainingArguments:
        return TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **settings)

    with pytest.raises(ValueError, match="use_reentrant"):
        check_arguments(arguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}))
    with pytest.raises(ValueError, match=r"use_liger_kernel=True.*'swiglu': False"):
        check_arguments(SimpleNamespace(use_liger_kernel=True, liger_kernel_config=None))
    check_arguments(SimpleNamespace(use_liger_kernel=True, liger_kernel_config={"swiglu": False}))
    check_arguments(arguments(gradient_checkpointing=True))


def loader(dataset: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=2)


def test_iterable_data_set_with_unequal_batch_counts() -> None:
    stream = Dataset.from_dict({"x": list(range(10))}).to_iterable_dataset(num_shards=4)
    mine = stream.shard(num_shards=2, index=0)  # as Accelerate's preparation does
    with pytest.raises(ValueError, match=r"iterable data set.*repeat\(None\)"):
        check_loader(loader(mine), ranks=2)
    check_loader(loader(mine), ranks=1)
    check_loader(loader(mine.repeat(None)), ranks=2)
    check_loader(loader(Dataset.from_dict({"x": [1, 2]})), ranks=2)


def test_callback_added_after_init(tmp_path) -> None:
    callback = LaerCallback()
    with pytest.raises(ValueError, match=r"added after.*callbacks=\[LaerCallback\(config\)\]"):
        callback.on_train_begin(None, TrainerState(), None, model=tiny_model("qwen3_moe"))


def test_offload_needs_a_cpu_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ValueError, match=r"cpu_offload.*InitProcessGroupKwargs\(backend='cpu:gloo,cuda:nccl'\)"):
        check_offload_group(torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    check_offload_group(torch.device("cuda"))


def test_cpu_fsdp_after_the_first_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"distributed_type": DistributedType.MULTI_CPU})
    monkeypatch.setattr(upstream, "is_installed", lambda name: False)
    with pytest.raises(RuntimeError, match="before the first"):
        enable_cpu_fsdp()


def test_plugin_is_fsdp2_by_default() -> None:
    plugin = LaerFSDPPlugin()
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    assert plugin.fsdp_version == 2
    assert plugin.laer == LaerConfig()


def test_plugin_brings_fsdp_to_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would train processes on CPUs as DDP, unpatched, and say nothing."""
    asked: list[bool] = []
    monkeypatch.setattr("hf_laer.integrations.accelerate.plugin.enable_cpu_fsdp", lambda: asked.append(True))
    LaerFSDPPlugin()
    assert asked == [True]


def test_processes_that_would_each_train_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher that does not say LOCAL_RANK: Accelerate sees one process, and forgets the plugin."""
    # Training arguments of earlier tests may have said the one, and made a state.
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    for variable in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        for started in ("1", "2"):
            monkeypatch.setenv(variable, started)
            with fresh_accelerate():
                if started == "1":
                    assert Accelerator(fsdp_plugin=LaerFSDPPlugin()).distributed_type == DistributedType.NO
                    assert "NO: LaerFSDPPlugin takes no part" in caplog.text
                    patch_model(tiny_model("qwen3_moe"))
                else:
                    cases.refused_alone()
            monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    "case", [cases.conflicting_plugin, cases.processes_that_train_alone, cases.ddp_in_a_plain_loop]
)
def test_refused_on_ranks(ranks, case: Any) -> None:
    ranks(2).run(case)


@pytest.mark.parametrize("case", [cases_trl.refused_by_trainer, cases_trl.unequal_streams])
def test_refused_by_trainer(ranks, tmp_path, case: Any) -> None:
    ranks(2).run(case, folder=str(tmp_path))
