"""What rank processes run for the reports on routers and their auxiliary loss."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_laer.integrations.trl import LaerCallback
from tests.engine.cases import average_dense_gradients, batch_of, compare_gradients, patched
from tests.integrations import rig, rig_trl
from tests.models import assert_close, full, tiny_model, tokens

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def padding_is_left_out() -> None:
    """The auxiliary loss of padded rows with a mask is that of the rows without padding, patched and not."""
    plain, model = tiny_model("qwen3_moe"), patched(tiny_model("qwen3_moe"), strategy="llep")
    ids = tokens(2, 6, seed=dist.get_rank())
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.int64)], 1)
    mask = (torch.arange(11) < 6).long().expand(2, -1)
    losses = []
    for which in (plain, model):
        settings = {"output_router_logits": True, "use_cache": False}
        bare = which(input_ids=ids, **settings).aux_loss
        masked = which(input_ids=padded, attention_mask=mask, **settings).aux_loss
        counted = which(input_ids=padded, **settings).aux_loss
        assert_close(masked, bare, "aux loss with padding", 1e-6)
        assert abs(counted - bare) > 1e-3, "padding changes nothing: the test proved nothing"
        losses.append(bare)
    assert_close(losses[1], losses[0], "aux loss", 1e-6)


def all_to_two_experts() -> list[float]:
    """The auxiliary loss where the router gives experts 0 and 1 a half each, unpatched and patched."""
    losses = []
    for patch in (False, True):
        model = tiny_model("qwen3_moe", num_experts=8, num_hidden_layers=1)
        with torch.no_grad():
            model.model.embed_tokens.weight.fill_(1.0)
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.gate.weight.fill_(-1.0)[:2] = 1.0
        if patch:
            patched(model, strategy="llep")
        ids = batch_of(dist.get_rank())
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
        assert torch.allclose(out.router_logits[0].softmax(-1)[:, :2], torch.tensor(0.5))
        losses.append(float(out.aux_loss))
    return losses


def switched(family: str) -> None:
    """With the coefficient set, the flag off and on: present or not, the same value and gradient as unpatched."""
    plain, model = (tiny_model(family, router_aux_loss_coef=0.01) for _ in range(2))
    patched(model, strategy="fsep")
    ids = batch_of(dist.get_rank())
    for flag in (False, True):
        out, want = (_forward(which, ids, flag) for which in (model, plain))
        assert (out.aux_loss is None) == (want.aux_loss is None) == (not flag)
        assert_close(out.loss.detach(), want.loss.detach(), f"loss with the flag {flag}")
        if flag:
            assert_close(out.aux_loss.detach(), want.aux_loss.detach(), "aux loss")
            assert out.aux_loss.requires_grad
            assert_close(out.loss.detach(), (_forward(model, ids, False).loss + 0.01 * out.aux_loss).detach(), "sum")


def _forward(model: nn.Module, ids: torch.Tensor, flag: bool) -> Any:
    model.config.output_router_logits = flag
    return model(input_ids=ids, labels=ids, use_cache=False)


def auxiliary_alone(family: str, strategy: str) -> None:
    """The auxiliary loss by itself: the routers' gradients are the unpatched ones, and linear in the coefficient."""
    plain, model = tiny_model(family), patched(tiny_model(family), strategy=strategy)
    world, seen = dist.get_world_size(), {}
    for coefficient in (1.0, 0.25):
        plain.zero_grad()
        model.zero_grad()
        total = sum(_auxiliary(plain, batch_of(rank)) for rank in range(world))
        (coefficient * total / world).backward()
        (coefficient * _auxiliary(model, batch_of(dist.get_rank()))).backward()
        want = {name: torch.zeros(p.shape) if p.grad is None else p.grad for name, p in plain.named_parameters()}
        compare_gradients(model, want)
        for name, parameter in model.named_parameters():
            if ".gate." in name or "router." in name:
                assert parameter.grad.any(), name
                seen.setdefault(name, []).append(full(parameter.grad))
    assert len(seen) >= 2
    for name, (first, second) in seen.items():
        assert_close(second, 0.25 * first, name)


def _auxiliary(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss


def ranks_of_auxiliary() -> dict[str, torch.Tensor]:
    """The routers' gradients from the auxiliary loss alone, every rank having the same batch."""
    model = patched(tiny_model("qwen3_moe"), strategy="llep")
    _auxiliary(model, tokens(2, 7, seed=3)).backward()
    average_dense_gradients(model)
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if ".gate." in name}


def logits_and_hooks(family: str) -> None:
    """One ``[B * S, E]`` per MoE layer, equal to the unpatched; hooks on routers, made before and after, run once."""
    plain, model = (tiny_model(family, num_hidden_layers=3) for _ in range(2))
    calls: dict[str, int] = {}
    _count_calls(model, "before", calls)
    patched(model, strategy="fsep")
    _count_calls(model, "after", calls)
    ids = batch_of(dist.get_rank())
    got, want = (which(input_ids=ids, output_router_logits=True, use_cache=False) for which in (model, plain))
    assert len(got.router_logits) == len(want.router_logits) == 3
    for layer, (ours, theirs) in enumerate(zip(got.router_logits, want.router_logits, strict=True)):
        assert ours.shape == (ids.numel(), 7)
        assert_close(ours.detach(), theirs.detach(), f"router logits of layer {layer}")
    got.logits.sum().backward()
    assert calls == {f"{when}{layer}": 1 for layer in range(3) for when in ("before", "after")}


def _count_calls(model: nn.Module, when: str, calls: dict[str, int]) -> None:
    for at, layer in enumerate(model.model.layers):
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate

        def note(module: nn.Module, args: Any, out: Any, key: str = f"{when}{at}") -> None:
            calls[key] = calls.get(key, 0) + 1

        router.register_forward_hook(note)


def by_trl(folder: str, coefficients: list[float]) -> list[tuple[list[float], str]]:
    """TRL's ``router_aux_loss_coef``: patched as unpatched at the same ranks; what was logged of it.

    Returns:
        By coefficient, the logged auxiliary losses and what the callback said.
    """
    results = []
    for coefficient in coefficients:
        settings = {"router_aux_loss_coef": coefficient, "max_steps": 2}
        theirs = rig.reference(rig_trl.run_sft, folder, "qwen3_moe", **settings)
        with rig.fresh_accelerate(), _Messages() as messages:
            ours = rig_trl.run_sft(folder, "qwen3_moe", [LaerCallback(rig.eager(strategy="fsep"))], **settings)
        rig.assert_same(ours, theirs)
        logged, expected = ([log["aux_loss"] for log in run["logs"] if "aux_loss" in log] for run in (ours, theirs))
        assert logged == pytest.approx(expected, rel=1e-5)
        results.append((logged, messages.about("auxiliary")))
    return results


class _Messages(logging.Handler):
    """What the callback logs within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def about(self, word: str) -> str:
        return " ".join(line for line in self.lines if word in line)

    def __enter__(self) -> _Messages:
        self.logger = logging.getLogger("hf_laer")
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)
