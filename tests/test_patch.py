"""patch_model on one device: what a notebook sees."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hf_laer
from hf_laer import LaerConfig, expert_parameters, is_patched, patch_model, unpatch_model
from tests.models import FAMILIES, assert_close, tiny_model, tokens


def run(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    ids = tokens(3, 7)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["ep", "llep", "fsep", "fsep+llep", "fsdp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_device_equals_unpatched(family: str, strategy: str) -> None:
    plain, model = tiny_model(family), tiny_model(family)
    assert patch_model(model, LaerConfig(strategy=strategy)) is model
    (loss, grads), (want_loss, want) = run(model), run(plain)
    assert_close(loss, want_loss, "loss")
    for name, grad in want.items():
        got = grads[name]
        if grad is None:
            assert got is None or got.abs().max() == 0
        else:
            assert got is not None
            assert_close(got, grad, name)


def test_unpatch_gives_the_plain_model_back() -> None:
    model = tiny_model("mixtral")
    before = {name: id(p) for name, p in model.named_parameters()}
    want, _ = run(model)
    patch_model(model)
    assert is_patched(model)
    assert len(expert_parameters(model)) == 4
    assert unpatch_model(model) is model
    assert not is_patched(model)
    assert model.config._experts_implementation == "eager"
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert "_set_gradient_checkpointing" not in model.__dict__
    got, _ = run(model)
    assert torch.equal(got, want)
    assert unpatch_model(model) is model
    with pytest.raises(ValueError, match="patch_model first"):
        expert_parameters(model)


def test_patching_twice() -> None:
    model = tiny_model("mixtral")
    config = LaerConfig(strategy="fsep")
    patch_model(model, config)
    assert patch_model(model, LaerConfig(strategy="fsep")) is model
    with pytest.raises(RuntimeError, match="patched already"):
        patch_model(model, LaerConfig(strategy="ep"))


def test_copies_and_pickles_are_ordinary_models() -> None:
    model = patch_model(tiny_model("qwen3_moe"))
    want, _ = run(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers))):
        assert not is_patched(other)
    got, grads = run(copy.deepcopy(model))
    assert_close(got, want, "loss of the copy")
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_models_that_share_one_config(family: str) -> None:
    """Patching one leaves the other with the implementation that it had, which still can be changed."""
    first = tiny_model(family)
    second = type(first)(first.config).train()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    want, _ = run(second)
    patch_model(first, LaerConfig(strategy="fsep"))
    got, _ = run(second)
    assert torch.equal(got, want), "the other model no longer runs its own experts"
    assert first.config._experts_implementation == "eager"
    assert_close(run(first)[0], want, "loss of the patched one")
    second.set_experts_implementation("batched_mm")
    assert is_patched(first)
    assert_close(run(first)[0], want, "loss of the patched one")
    patch_model(second)
    unpatch_model(first)
    assert is_patched(second)
    for model in (first, second):
        assert_close(run(model)[0], want, "loss")
    assert all(layer.mlp.experts.config is first.config for layer in first.model.layers)


def test_naming_us_without_patching_is_refused() -> None:
    patch_model(tiny_model("qwen3_moe"))
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("hf_laer")
    with pytest.raises(RuntimeError, match="call patch_model"):
        run(model)


def test_copies_follow_their_own_config() -> None:
    other = copy.deepcopy(patch_model(tiny_model("qwen3_moe")))
    other.config._experts_implementation = "nonsense"
    with pytest.raises(KeyError, match="nonsense"):
        run(other)


def test_other_wrappers_are_refused() -> None:
    model = tiny_model("mixtral")
    torch.nn.DataParallel(model)
    patch_model(model)
    with pytest.raises(ValueError, match=r"DataParallel cannot hold.*LaerFSDPPlugin"):
        torch.nn.DataParallel(model)
    torch.nn.ModuleList([model])
    torch.nn.DataParallel(unpatch_model(model))


def test_saved_config_does_not_name_us(tmp_path) -> None:
    model = patch_model(tiny_model("gpt_oss"))
    want, _ = run(model)
    model.save_pretrained(tmp_path)
    assert "hf_laer" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path, experts_implementation="eager").train()
    assert not is_patched(again)
    got, _ = run(again)
    assert_close(got, want, "loss after reload")


def test_optimizer_made_before_patching_trains_the_experts() -> None:
    model = tiny_model("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patch_model(model)
    experts = expert_parameters(model)
    before = [p.detach().clone() for p in experts]
    run(model)
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(experts, before, strict=True))


def test_facade_is_lazy() -> None:
    assert set(hf_laer.__all__) <= {*dir(hf_laer), *hf_laer.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_laer.nothing  # noqa: B018


def test_planners_need_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, hf_laer.plan; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_changed_upstream_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    patch_model(model)
    changed = tiny_model("mixtral")
    monkeypatch.setattr(type(changed), "_set_gradient_checkpointing", lambda self, on: None)
    with pytest.raises(RuntimeError, match="not what hf_laer was tested with"):
        patch_model(changed)
    assert not is_patched(changed)
