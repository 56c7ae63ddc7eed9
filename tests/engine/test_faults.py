"""Faults once found by trying to break the engine; each stays a test."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_laer import LaerConfig, is_patched, patch_model, unpatch_model
from tests.engine import cases_faults
from tests.models import tiny_model, tokens


def loss(model: nn.Module) -> torch.Tensor:
    ids = tokens(2, 5)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("uses", [1, 3])
def test_hooks_run_once(ranks, uses: int) -> None:
    assert ranks(2).run(cases_faults.hooks_run_once, uses=uses) == [[True], [True]]


def test_gradient_hooks_are_refused() -> None:
    model = patch_model(tiny_model("mixtral"))
    model.model.layers[0].mlp.experts.down_proj.register_hook(lambda grad: grad * 0)
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        loss(model).backward()


def test_inference_mode_before_training(ranks) -> None:
    ranks(2).run(cases_faults.inference_first)


def test_failed_patch_leaves_the_plain_model(ranks) -> None:
    ranks(2).run(cases_faults.failed_patch)


def test_mesh_that_leaves_ranks_out(ranks) -> None:
    assert all("2 of the 4 ranks" in message for message in ranks(4).run(cases_faults.partial_mesh))


def test_ranks_told_differently(ranks) -> None:
    assert all("ranks_per_node" in message for message in ranks(2).run(cases_faults.told_differently))


def test_parameters_modified_between_forward_and_backward(ranks) -> None:
    assert all("modified in place" in message for message in ranks(2).run(cases_faults.modified_between))


def test_sums_are_scaled_before_they_are_rounded(ranks) -> None:
    ranks(2).run(cases_faults.half_sum)


def test_optimizer_made_before_follows_at_once(ranks) -> None:
    ranks(2).run(cases_faults.optimizer_before)


def test_replaced_parameters_are_followed() -> None:
    plain, model = tiny_model("mixtral", seed=1), patch_model(tiny_model("mixtral"))
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(loss(model), loss(plain))
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * 2)
    plain.model.layers[0].mlp.experts.down_proj.data.mul_(2)
    torch.testing.assert_close(loss(model), loss(plain))


def test_parametrized_parameters_are_refused() -> None:
    model = patch_model(tiny_model("mixtral"))
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.experts, "down_proj", nn.Identity())
    with pytest.raises(RuntimeError, match="change the model before patch_model"):
        loss(model)


def test_adapters_that_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    biases = LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj_bias"])
    with pytest.raises(ValueError, match="not on their biases"):
        patch_model(get_peft_model(tiny_model("gpt_oss"), biases))
    merged = get_peft_model(tiny_model("qwen3_moe"), LoraConfig(target_modules=[], target_parameters=["down_proj"]))
    merged.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        patch_model(merged)


def test_shared_experts_are_refused() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.down_proj = model.model.layers[0].mlp.experts.down_proj
    with pytest.raises(ValueError, match="one parameter"):
        patch_model(model)


def test_copies_of_patched_models() -> None:
    model = patch_model(tiny_model("mixtral"), LaerConfig(strategy="llep"))
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    assert other.model.layers[0].gradient_checkpointing
    assert not model.model.layers[0].gradient_checkpointing
    patch_model(other)
    loss(other).backward()
    unpatch_model(other)
    assert other.config._experts_implementation == "eager"
    assert not is_patched(pickle.loads(pickle.dumps(model)))
    torch.testing.assert_close(loss(copy.deepcopy(copy.deepcopy(model))), loss(model))
