"""Reports of wrong gradients and numbers (section B), each tried on this engine."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_laer import LaerConfig, patch_model
from hf_laer.config import STRATEGIES
from hf_laer.integrations.transformers import get_engine
from tests.covering import later
from tests.models import tiny_model
from tests.reports import cases_gradients as cases


@pytest.mark.parametrize("strategy", ["llep", *later("fsep")])
def test_b12_unwritten_memory(ranks, strategy: str) -> None:
    ranks(2).run(cases.unwritten_memory, strategy=strategy)


@pytest.mark.parametrize("world_size", [*later(2), 4])
def test_b13_every_gradient(ranks, world_size: int) -> None:
    families = zip(("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe"), ("llep", "fsep", "fsep+llep", "ep"), strict=True)
    for family, strategy in families:
        every = [name for name, _ in tiny_model(family).named_parameters()]
        assert {"embed_tokens", "q_proj", "norm", "experts"} <= {part for name in every for part in name.split(".")}
        for good in ranks(world_size).run(cases.every_gradient, family=family, strategy=strategy):
            assert good == every, f"{family}: wrong gradients of {sorted(set(every) - set(good))}"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_b14_router_gradient_by_implementation(ranks, family: str) -> None:
    ranks(2).run(cases.router_gradients, family=family, strategy="llep")


def settings(meshes: list[tuple[int, ...]], groups: list[int | None], experts: list[int]) -> list[dict[str, Any]]:
    """Every combination, with every strategy to which it applies."""
    return [
        {"strategy": strategy, "mesh": mesh, "group_size": group, "experts": number}
        for strategy, mesh, group, number in itertools.product(STRATEGIES, meshes, groups, experts)
        if not (strategy == "fsdp" and group not in (None, 1)) and mesh[-1] % (group or 1) == 0
    ]


def check_factors(ranks: Any, world_size: int, wanted: list[dict[str, Any]]) -> None:
    """All factors are 1."""
    for of_rank in ranks(world_size).run(cases.all_factors, settings=wanted):
        assert len(of_rank) == len(wanted)
        for setting, factors in of_rank:
            wrong = {name: factor for name, factor in factors.items() if not abs(factor - 1) <= 1e-5}
            assert len(factors) == 8
            assert not wrong, f"{setting}: {wrong}"


def test_b16_averaged_once(ranks) -> None:
    """Expert gradients, SGD's step and AdamW's moments: once the unpatched ones, not once for each rank."""
    check_factors(ranks, 2, settings([(2,)], [None, 1], [7, 1]))
    check_factors(ranks, 4, settings([(4,)], [None, 2], [7]))


@pytest.mark.long
def test_b16_three_ranks_and_ranks_that_own_nothing(ranks) -> None:
    check_factors(ranks, 3, settings([(3,)], [None], [7, 2]) + settings([(3,)], [1], [5]))
    check_factors(ranks, 4, settings([(4,)], [None, 2], [2]) + settings([(2, 2)], [None], [1]))


@pytest.mark.long
def test_b17_a_shard_group_of_one(ranks) -> None:
    """Groups and meshes down to one rank, also where every rank holds everything (HSDP)."""
    check_factors(ranks, 1, settings([(1,)], [None], [7]))
    check_factors(ranks, 4, settings([(4,)], [4, 1], [7]))
    check_factors(ranks, 4, settings([(4, 1), (2, 2), (1, 4)], [None, 1], [7]))


def test_b20_down_bias_has_its_probability(ranks) -> None:
    for out in ranks(2).run(cases.down_bias):
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)


def test_b23_both_experts_on_one_rank(ranks) -> None:
    """A token travels once to the rank of both its experts; what is said to travel does."""
    found = ranks(2).run(cases.both_experts_on_one_rank, strategy="ep")
    for rank, (rows, choices, shapes) in enumerate(found):
        count = 5 + 2 * rank
        assert rows == [0, count]
        assert choices == [0, 2 * count]
        arrived = [0, 12][rank]
        # Rows out and results back, forward; gradients likewise, backward.
        assert shapes == [(count, 34), (arrived, 34)] * 2
    ranks(2).run(cases.both_experts_on_one_rank, strategy="llep")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_b24_rows_alone(ranks, family: str) -> None:
    ranks(2).run(cases.rows_alone, family=family, strategy="llep")


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep"])
def test_b26_experts_and_top_k(ranks, strategy: str) -> None:
    ranks(2).run(cases.blocks, strategy=strategy, sizes=[(64, 8), (8, 2), (8, 1), (5, 5)])


def test_b28_every_block_is_patched(caplog: pytest.LogCaptureFixture) -> None:
    """Inside PEFT's and a vision model's prefixes too; and what matches nothing is an error."""
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(tiny_model("qwen3_moe"), LoraConfig(target_modules=["q_proj"]))
    with caplog.at_level(logging.INFO, logger="hf_laer"):
        for model, prefix in ((lora, "base_model.model.model.layers"), (vision_model(), "model.language_model.layers")):
            patch_model(model)
            engine = get_engine(model)
            assert engine is not None
            assert list(engine.layers) == [f"{prefix}.{layer}.mlp.experts" for layer in range(2)]
    assert caplog.text.count("hf_laer runs 2 MoE layers") == 2
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dense = AutoConfig.for_model("llama", intermediate_size=16, **sizes)
    with pytest.raises(ValueError, match="no MoE layer"):
        patch_model(AutoModelForCausalLM.from_config(dense))
    with pytest.raises(ValueError, match="no setting strategi; known: "):
        LaerConfig.from_dict({"strategi": "llep"})


def vision_model() -> torch.nn.Module:
    """A small Qwen3-VL with two MoE layers in its language model."""
    text = {
        "vocab_size": 67,
        "hidden_size": 34,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 25,
        "intermediate_size": 50,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 34}
    vision |= {"deepstack_visual_indexes": []}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    return AutoModelForImageTextToText.from_config(config, experts_implementation="eager")


def test_b29_layers_without_experts(ranks) -> None:
    changes = {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    for names in ranks(2).run(cases.logits_equal, family="qwen3_moe", strategy="fsep", changes=changes):
        assert names == ["model.layers.1.mlp.experts", "model.layers.3.mlp.experts"]
    for names in ranks(2).run(cases.logits_equal, family="qwen2_moe", strategy="llep", changes={}):
        assert len(names) == 2


def test_b29_shared_expert_and_weights_that_are_not_normalized() -> None:
    """What the row above relies on in the small model."""
    model = tiny_model("qwen2_moe")
    assert model.config.norm_topk_prob is False
    assert model.model.layers[0].mlp.shared_expert_gate.weight.shape == (1, 34)


@pytest.mark.parametrize("strategy", ["llep", "fsep"])
def test_b30_interleaved_and_transposed(ranks, tmp_path, strategy: str) -> None:
    ranks(2).run(cases.sharded_and_gathered, folder=str(tmp_path), strategy=strategy)
