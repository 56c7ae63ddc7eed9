"""What rank processes run for the reports on clipping, optimizers and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import hf_laer.layer
from hf_laer import patch_model
from hf_laer.compute import chunks
from hf_laer.integrations.accelerate import LaerFSDPPlugin
from tests.engine.cases import world_mesh
from tests.integrations import rig, rig_trl
from tests.models import assert_close, full, tiny_model, tokens

MAX_NORM = 0.5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "default": partial(torch.optim.AdamW, lr=5e-3, eps=rig.EPSILON),
    "foreach": partial(torch.optim.AdamW, lr=5e-3, eps=rig.EPSILON, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=5e-3, eps=rig.EPSILON, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
ADAFACTORS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": partial(torch.optim.Adafactor, lr=1e-2),
    "transformers": partial(transformers.Adafactor, lr=1e-2, relative_step=False, scale_parameter=False),
}


def plugin(strategy: str, **settings: Any) -> LaerFSDPPlugin:
    """FSDP2 with experts run by ``strategy``."""
    return rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy), **settings)


# B56, B59


def one_process(family: str, optimizer: str, steps: int) -> dict[str, Any]:
    """What :class:`rig.Loop` does, by the unpatched model on one process with the ranks' batches."""
    model, world = tiny_model(family), dist.get_world_size()
    made = OPTIMIZERS[optimizer](model.parameters())
    norms = []
    for step in range(steps):
        for micro in (2 * step, 2 * step + 1):
            for rank in range(world):
                ids = rig.loop_batch(rank, micro)
                (model(input_ids=ids, labels=ids, use_cache=False).loss / (2 * world)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        made.step()
        made.zero_grad()
    return {"grad_norm": norms, "weights": rig.gathered(model)}


def steps_like_one_process(strategy: str, optimizers: list[str], steps: int) -> dict[str, list[float]]:
    """Clipped steps of each optimizer equal those of one process; returns the norms, by optimizer."""
    norms = {}
    for optimizer in optimizers:
        theirs = one_process("qwen3_moe", optimizer, steps)
        with rig.fresh_accelerate():
            ours = rig.Loop("qwen3_moe", plugin(strategy), optimizer=OPTIMIZERS[optimizer]).train(steps)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5, err_msg=optimizer)
        far = rig.distances(ours["weights"], theirs["weights"])
        assert max(far.values()) <= 2e-5, (optimizer, far)
        norms[optimizer] = theirs["grad_norm"]
    return norms


def adafactors(strategy: str) -> dict[str, list[str]]:
    """What comes of a step with each Adafactor, unpatched and patched: an error's kind, or that it ran.

    Where both run, the weights are the same.
    """
    outcomes: dict[str, list[str]] = {}
    for name, optimizer in ADAFACTORS.items():
        weights = []
        for made in (rig.fsdp_plugin(), plugin(strategy)):
            with rig.fresh_accelerate():
                run = rig.Loop("qwen3_moe", made, optimizer=optimizer)
                try:
                    weights.append(run.train(1)["weights"])
                    outcomes.setdefault(name, []).append("ran")
                except RuntimeError as error:
                    outcomes.setdefault(name, []).append(type(error).__name__)
        if len(weights) == 2:
            assert max(rig.distances(*weights).values()) <= 2e-5
    return outcomes


def clipped_by_torch(strategy: str) -> None:
    """PyTorch's own clipping, foreach or not, and Accelerate's give one norm, and one clipped gradient."""
    clips = {
        "foreach": partial(nn.utils.clip_grad_norm_, foreach=True),
        "loop": partial(nn.utils.clip_grad_norm_, foreach=False),
        "default": nn.utils.clip_grad_norm_,
        "accelerate": None,
    }
    with rig.fresh_accelerate():
        run = rig.Loop("mixtral", plugin(strategy), gradient_accumulation_steps=1)
        ids = rig.loop_batch(dist.get_rank(), 0)
        norms, clipped = {}, {}
        for name, clip in clips.items():
            run.model.zero_grad()
            run.accelerator.backward(run.model(input_ids=ids, labels=ids, use_cache=False).loss)
            before = {key: full(p.grad) for key, p in run.model.named_parameters()}
            norm = (clip or run.accelerator.clip_grad_norm_)(run.model.parameters(), MAX_NORM)
            norms[name] = float(full(norm))
            clipped[name] = {key: full(p.grad) for key, p in run.model.named_parameters()}
    want = float(torch.cat([grad.flatten() for grad in before.values()]).norm())
    assert want > 2 * MAX_NORM
    for name, norm in norms.items():
        assert abs(norm - want) <= 1e-5 * want, (name, norm, want)
        for key, grad in clipped[name].items():
            assert_close(grad, before[key] * (MAX_NORM / (want + 1e-6)), f"{key} clipped by {name}")


# B57


def known_norms(strategy: str, parallelism: tuple[int, int] | None = None) -> list[float]:
    """The norm of gradients whose norms are known, by Accelerate and by PyTorch: experts 3, 4, 12, 84, dense 132."""
    with rig.fresh_accelerate():
        run = rig.Loop("qwen3_moe", plugin(strategy), sizes={"num_experts": 4}, parallelism=parallelism)
        for name, parameter in run.model.named_parameters():
            gradient = torch.zeros(parameter.shape)
            if name.endswith("layers.1.mlp.experts.down_proj"):
                gradient[:] = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                gradient *= (torch.tensor([3.0, 4.0, 12.0, 84.0]) / gradient.flatten(1).norm(dim=1)).view(4, 1, 1)
            elif name == "lm_head.weight":
                gradient.fill_(132.0 / parameter.numel() ** 0.5)
            parameter.grad = _as(parameter, gradient)
        total = nn.utils.get_total_norm([p.grad for p in run.model.parameters()])
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        left = nn.utils.get_total_norm([p.grad for p in run.model.parameters()])
        return [float(full(value)) for value in (total, norm, left)]


def _as(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """``value``, distributed as the parameter is; by our own count of blocks, not by the engine's."""
    assert isinstance(parameter, DTensor)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


# B60


def first_used_late(strategy: str) -> dict[str, tuple[float, float]]:
    """bf16 compute, fp32 reduction, three micro-batches; expert 2 is used in the first only, expert 5 in the last.

    Returns:
        By parameter: the unpatched bf16 model's error against fp32, and ours.
    """
    used = ((0, 2), (0, 1), (0, 5))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rounded = tiny_model("mixtral", dtype=torch.bfloat16)
    exact = _accumulated(tiny_model("mixtral"), rounded, used)
    theirs = _accumulated(rounded, rounded, used)
    with rig.fresh_accelerate():
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin(strategy, mixed_precision_policy=policy), gradient_accumulation_steps=3
        )
        model = tiny_model("mixtral")
        model.load_state_dict(rounded.state_dict())
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for micro, experts in enumerate(used):
            with accelerator.accumulate(model), _routed(model, experts):
                ids = tokens(2, 9, seed=10 * micro + dist.get_rank())
                accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        ours = {name: full(p.grad) for name, p in model.named_parameters()}
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    gate_up = ours["model.layers.0.mlp.experts.gate_up_proj"]
    assert [bool(grad.any()) for grad in gate_up] == [True, True, True, False, False, True, False]
    return {
        name: tuple(float((grad.float() - want).norm() / want.norm()) for grad in (theirs[name], ours[name]))
        for name, want in exact.items()
    }


def _accumulated(model: nn.Module, weights: nn.Module, used: tuple[tuple[int, int], ...]) -> dict[str, torch.Tensor]:
    """Float32 sums of the micro-batches' gradients of all ranks, by one process."""
    model.load_state_dict(weights.state_dict())
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for micro, experts in enumerate(used):
        for rank in range(dist.get_world_size()):
            model.zero_grad()
            ids = tokens(2, 9, seed=10 * micro + rank)
            with _routed(model, experts):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            for name, parameter in model.named_parameters():
                total[name] += parameter.grad.float() / (len(used) * dist.get_world_size())
    return total


class _routed:
    """Within it, every token goes to the given experts, under the router's weights."""

    def __init__(self, model: nn.Module, experts: tuple[int, int]) -> None:
        self.model, self.experts, self.handles = model, experts, []

    def _choose(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = args
        return hidden, torch.tensor(self.experts, dtype=index.dtype).expand(len(index), -1), weights

    def __enter__(self) -> None:
        blocks = [layer.mlp.experts for layer in self.model.model.layers]
        self.handles = [block.register_forward_pre_hook(self._choose) for block in blocks]

    def __exit__(self, *exc: Any) -> None:
        for handle in self.handles:
            handle.remove()


# B61, B62


def master_weights(strategy: str) -> dict[str, Any]:
    """A bf16 model trained in mixed precision at lr 1e-5: dtypes everywhere, and how far weights near 1 go.

    Returns:
        ``storage``, ``moments``, ``compute`` and ``reduce`` of experts and dense layers; ``moved``.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = _twenty_steps(rig.fsdp_plugin(mixed_precision_policy=policy))
    ours = _twenty_steps(plugin(strategy, mixed_precision_policy=policy))
    assert ours["router"] == theirs["router"], "the router runs in another dtype than upstream's"
    return ours


def _twenty_steps(made: Any) -> dict[str, Any]:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    experts, norm = "model.layers.0.mlp.experts.down_proj", "model.layers.0.post_attention_layernorm.weight"
    with torch.no_grad():
        for name in (experts, norm):
            model.get_parameter(name).fill_(1.0)
    seen: dict[str, set[Any]] = {"compute": set(), "reduce": set(), "router": set()}
    with rig.fresh_accelerate(), _watched(model, seen):
        optimizer = partial(torch.optim.AdamW, lr=1e-5, eps=1e-12, weight_decay=0.0)
        run = rig.Loop(
            "", made, model=model, optimizer=optimizer, mixed_precision="bf16", gradient_accumulation_steps=1
        )
        ids = rig.loop_batch(dist.get_rank(), 0)
        for _ in range(20):
            run.accelerator.backward(run.model(input_ids=ids, labels=ids, use_cache=False).loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        held = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in run.model.parameters()}
        after = {name: full(run.model.get_parameter(name).data) for name in (experts, norm)}
        return seen | {
            "storage": {p.dtype for p in held},
            "moments": {run.optimizer.state[p][key].dtype for p in held for key in ("exp_avg", "exp_avg_sq")},
            "moved": {name: float((value - 1).abs().max()) for name, value in after.items()},
        }


class _watched:
    """Notes the dtypes in which experts, dense layers and routers compute, and experts reduce."""

    def __init__(self, model: nn.Module, seen: dict[str, set[Any]]) -> None:
        self.seen = seen
        layer = model.model.layers[0]
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, out: seen["compute"].update({module.weight.dtype, out.dtype})
        )
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out: seen["router"].add((module.weight.dtype, *(part.dtype for part in out)))
        )

    def __enter__(self) -> None:
        self.before = chunks.first_product, hf_laer.layer.start_reshard
        chunks.first_product, hf_laer.layer.start_reshard = self._compute, self._reduce  # type: ignore

    def __exit__(self, *exc: Any) -> None:
        chunks.first_product, hf_laer.layer.start_reshard = self.before

    def _compute(self, spec: Any, weights: Any, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        self.seen["compute"].update({rows.dtype, *(stack.dtype for stack in weights[spec.up])})
        return self.before[0](spec, weights, rows, *args)

    def _reduce(self, *args: Any) -> Any:
        self.seen["reduce"].update(arg for arg in args if isinstance(arg, torch.dtype))
        return self.before[1](*args)


# B63


def optimizer_holds_what_is_trained() -> None:
    """Patched before or after the optimizer is made, or by the plugin: it holds the model's parameters, all move."""
    for order in ("patch first", "optimizer first", "plugin"):
        with rig.fresh_accelerate():
            made = plugin("fsep") if order == "plugin" else rig.fsdp_plugin()
            accelerator, model = Accelerator(cpu=True, fsdp_plugin=made), tiny_model("qwen3_moe")
            if order == "patch first":
                patch_model(model, rig.eager(strategy="fsep"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if order == "optimizer first":
                patch_model(model, rig.eager(strategy="fsep"))
            model, optimizer = accelerator.prepare(model, optimizer)
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert held == [id(p) for p in model.parameters()], order
            before = rig.gathered(model)
            ids = rig.loop_batch(dist.get_rank(), 0)
            accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            optimizer.step()
            still = [name for name, far in rig.distances(rig.gathered(model), before).items() if far == 0]
            assert not still, (order, still)


def patched_too_late(folder: str) -> None:
    """After ``prepare``, in ``on_train_begin``, or after the optimizer has taken steps: refused."""
    with rig.fresh_accelerate():
        run = rig.Loop("qwen3_moe", rig.fsdp_plugin())
        with pytest.raises(RuntimeError, match=r"sharded already.*before accelerator\.prepare"):
            patch_model(run.model)
    with rig.fresh_accelerate():
        trainer = rig_trl.sft_trainer(folder, "qwen3_moe", [_PatchesLate()])
        with pytest.raises(RuntimeError, match=r"sharded already.*before accelerator\.prepare"):
            trainer.train()
    model = tiny_model("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = rig.loop_batch(dist.get_rank(), 0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="optimizer has taken steps"):
        patch_model(model, mesh=world_mesh())


class _PatchesLate(TrainerCallback):
    """What a user might write."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        patch_model(model)


# B66


def accumulated(strategy: str) -> list[dict[str, int]]:
    """Four micro-batches of 3 and 9 trained tokens have the gradients of one batch.

    Returns:
        After each micro-batch, how often experts' gradients have gone home, and how often FSDP has reduced.
    """
    valid, world = (3, 9, 3, 9), dist.get_world_size()
    total = sum(valid) * world
    plain = tiny_model("qwen3_moe")
    sum(_loss_sum(plain, rank, micro, valid[micro]) for rank in range(world) for micro in range(4)).div(
        total
    ).backward()
    counts, seen = {"home": 0, "reduced": 0}, []
    with rig.fresh_accelerate(), _counted(counts):
        run = rig.Loop("qwen3_moe", plugin(strategy), gradient_accumulation_steps=4)
        for micro in range(4):
            with run.accelerator.accumulate(run.model):
                # Accelerate divides by the micro-batches, FSDP by the ranks.
                loss = _loss_sum(run.model, dist.get_rank(), micro, valid[micro]) * 4 * world / total
                run.accelerator.backward(loss)
            seen.append(dict(counts))
        for name, parameter in run.model.named_parameters():
            assert_close(full(parameter.grad), plain.get_parameter(name).grad, name)
    return seen


def _loss_sum(model: nn.Module, rank: int, micro: int, valid: int) -> torch.Tensor:
    ids = tokens(1, 11, seed=10 * micro + rank)
    logits = model(input_ids=ids, use_cache=False).logits[0, :valid]
    return nn.functional.cross_entropy(logits, ids[0, 1 : valid + 1], reduction="sum")


class _counted:
    """Counts what reduces gradients."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        # FSDP2 calls the newer one where there is one.
        reduce = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        self.places: list[tuple[Any, str, str]] = [(dist, reduce, "reduced"), (hf_laer.layer, "start_reshard", "home")]

    def __enter__(self) -> None:
        self.before = [getattr(holder, name) for holder, name, _ in self.places]
        for (holder, name, what), function in zip(self.places, self.before, strict=True):
            setattr(holder, name, partial(self._count, what, function))

    def __exit__(self, *exc: Any) -> None:
        for (holder, name, _), function in zip(self.places, self.before, strict=True):
            setattr(holder, name, function)

    def _count(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.counts[what] += 1
        return function(*args, **kwargs)
