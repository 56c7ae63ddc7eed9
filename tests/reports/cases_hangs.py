"""Cases of uneven routing, empty ranks, unequal calls and bad numbers."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_laer import patch_model
from hf_laer.comm import groups
from hf_laer.comm.groups import communicators
from hf_laer.comm.routes import Sending, exchange
from hf_laer.comm.tokens import start_combine, start_dispatch
from hf_laer.comm.watch import Watch
from hf_laer.compute.grouped_gemm import Arrangement
from hf_laer.compute.routing import count
from hf_laer.integrations.accelerate import LaerFSDPPlugin
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan import ep, own_part
from tests.engine.cases import batch_of, compare_gradients, loss_of, patched, world_mesh
from tests.engine.cases_edges import block_results
from tests.integrations import rig
from tests.models import assert_close, full, tiny_model, tokens
from tests.reports.cases_faults import told
from tests.reports.steered import Steered
from tests.reports.worlds import own_world

EIGHT = {"num_experts": 8}


def disjoint(strategy: str) -> None:
    """B01: rank 0 uses experts 0 and 1 alone, rank 1 experts 6 and 7; three SGD steps."""
    plain, model = tiny_model("qwen3_moe", **EIGHT), tiny_model("qwen3_moe", **EIGHT)
    patched(model, strategy=strategy, history=1)
    want_of, _ = Steered(plain, [(0, 1), (6, 7)]), Steered(model, [(0, 1), (6, 7)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, foreach=False) for m in (plain, model)]
    for step in range(3):
        want = want_of.gradients(step)
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        compare_gradients(model, want)
        for layer in model.model.layers:
            for name, parameter in layer.mlp.experts.named_parameters():
                assert parameter.grad is not None, name
                assert full(parameter.grad)[2:6].count_nonzero() == 0, name
        for name, parameter in plain.named_parameters():
            parameter.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()


def module_lists() -> None:
    """B01: experts as a list of modules are refused by name."""
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(34, 34) for _ in range(7))
    with pytest.raises(ValueError, match="not on Transformers' experts interface"):
        patch_model(model)


def one_sided(strategy: str, spill: bool) -> list[int]:
    """B02: every token goes to experts of rank 0; returns the tokens that each rank computed."""
    threshold = 1.0 if spill else 1e6
    plain, model = tiny_model("qwen3_moe", **EIGHT), tiny_model("qwen3_moe", **EIGHT)
    patched(model, strategy=strategy, imbalance_threshold=threshold)
    want_of, _ = Steered(plain, [(0, 1), (1, 2)]), Steered(model, [(0, 1), (1, 2)])
    rank = dist.get_rank()
    want = want_of.gradients(0)
    inputs = []
    for which in (plain, model):
        embedded = which.model.embed_tokens(batch_of(rank)).detach().requires_grad_()
        which.zero_grad()
        which(inputs_embeds=embedded, labels=batch_of(rank), use_cache=False).loss.backward()
        inputs.append(embedded.grad)
    assert_close(inputs[1], inputs[0], "gradient of the input")
    want.pop("model.embed_tokens.weight")
    model.model.embed_tokens.weight.grad = None
    named = {name: p for name, p in model.named_parameters() if name in want}
    for name, parameter in named.items():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        assert_close(full(parameter.grad), want[name], name)
        if rank == 1 and isinstance(parameter, DTensor):
            local = parameter.grad.to_local()
            assert (local.shape, local.dtype) == (parameter.to_local().shape, parameter.dtype)
            assert local.count_nonzero() == 0
    engine = get_engine(model)
    assert engine is not None
    return engine.recorder.drain()[0].loads_after.tolist()


MATRICES = {
    "zero row": [[0, 0, 0, 0], [3, 1, 0, 2], [1, 5, 2, 0], [2, 0, 1, 7]],
    "zero column": [[2, 0, 1, 4], [3, 0, 0, 2], [1, 0, 2, 0], [2, 0, 1, 7]],
    "all zero": [[0, 0, 0, 0]] * 4,
    "one owns all": [[0, 0, 3, 0], [0, 0, 5, 0], [0, 0, 1, 0], [0, 0, 2, 0]],
    "one sends all": [[0, 0, 0, 0], [0, 0, 0, 0], [4, 1, 0, 2], [0, 0, 0, 0]],
}


def matrices() -> None:
    """B05: dispatch and combine, then whole layers, under count matrices ``[source, owner]`` with holes."""
    comms = communicators(world_mesh(), 4, Watch())
    rank = dist.get_rank()
    for name, rows in MATRICES.items():
        counts = np.array(rows)
        index = torch.repeat_interleave(torch.arange(4), torch.tensor(counts[rank])).view(-1, 1)
        plan = ep(counts, np.arange(4))
        own, weights = own_part(plan, counts, rank), torch.ones(index.shape)
        lie = Arrangement.of(own.slots.tolist(), (1,), None)
        hidden = torch.arange(len(index) * 5.0).view(-1, 5) + 1000 * rank
        asked = hidden, hidden.dtype, index, weights, count(index, 4), plan.split, counts, own, lie
        routes = exchange(Sending(*asked), comms.tokens)
        arrived = start_dispatch(hidden, routes, comms.tokens).wait()
        assert arrived.shape == (counts[:, rank].sum(), 5), name
        sources = np.repeat(np.arange(4), counts[:, rank])
        assert (arrived[:, 0] // 1000).int().tolist() == sources.tolist(), name
        assert torch.equal(start_combine(arrived, routes, comms.tokens).finish(torch.float32), hidden), name


def matrix_layers(strategy: str) -> None:
    """B05: forward and backward of whole layers under the same matrices."""
    sizes = {"num_experts": 4}
    plain, model = tiny_model("qwen3_moe", **sizes), tiny_model("qwen3_moe", **sizes)
    patched(model, strategy=strategy, history=1)
    want_block, block = (m.model.layers[0].mlp.experts for m in (plain, model))
    for name, counts in MATRICES.items():
        want_block.zero_grad()
        block.zero_grad()
        inputs = [_matrix_inputs(row) for row in counts]
        results = [block_results(want_block, *each) for each in inputs]
        got = block_results(block, *inputs[dist.get_rank()])
        for what, ours, theirs in zip(("out", "hidden", "weights"), got, results[dist.get_rank()], strict=True):
            assert_close(ours, theirs, f"{what}, {name}")
        for key, parameter in block.named_parameters():
            grad = want_block.get_parameter(key).grad
            assert_close(full(parameter.grad), torch.zeros(parameter.shape) if grad is None else grad / 4, key)


def _matrix_inputs(row: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(row)).view(-1, 1)
    generator = torch.Generator().manual_seed(sum(row))
    return torch.randn(len(index), 34, generator=generator), index, torch.rand(len(index), 1, generator=generator)


def empty_calls(strategy: str) -> None:
    """B06: a whole MoE block without a token on one rank, then on all; collectives of nothing."""
    plain, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    patched(model, strategy=strategy)
    rank = dist.get_rank()
    for lengths in ((3, 5, 0, 2), (0, 0, 0, 0)):
        hidden = torch.randn(1, lengths[rank], 34, generator=torch.Generator().manual_seed(rank))
        want, got = (m.model.layers[0].mlp(hidden.clone().requires_grad_()) for m in (plain, model))
        assert got.shape == (1, lengths[rank], 34)
        assert got.grad_fn is not None
        assert_close(got.detach(), want.detach(), "output")
        got.sum().backward()
    engine = get_engine(model)
    assert engine is not None
    for comm in (engine.comms.weights, engine.comms.tokens):
        if comm.size > 1:
            assert comm.all_gather(torch.empty(0)).shape == (4, 0)
            assert comm.all_gather(torch.empty(0, 3)).shape == (4, 0, 3)
            assert comm.all_to_all(torch.empty(0, 3), [0] * 4, [0] * 4).shape == (0, 3)
            assert comm.all_reduce(torch.empty(0)).shape == (0,)


def generated(strategy: str, prepared: bool) -> list[int]:
    """B08: ranks whose sequences end at different steps; returns the length of each rank's new tokens."""
    plain = tiny_model("qwen3_moe").eval()
    prompt = tokens(1, 5, seed=dist.get_rank())
    free = plain.generate(prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)[0, 5:]
    # An end token that this rank meets early and the other one late, if at all.
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, free.tolist())
    early = next(token for token in everyone[0][1:4] if token not in everyone[1])
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": early}
    want = plain.generate(prompt, **settings)
    if not prepared:
        model = patched(tiny_model("qwen3_moe").eval(), strategy=strategy)
        got = model.generate(prompt, **settings)
    else:
        with rig.fresh_accelerate():
            plugin = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy))
            got = rig.Loop("qwen3_moe", plugin).model.eval().generate(prompt, **settings)
    assert torch.equal(got, want)
    return [int(want.shape[1]) - 5]


def alone(folder: str, prepared: bool, limit: float) -> dict[str, Any]:
    """B08: after training, rank 0 alone runs a forward."""
    with own_world(folder, limit), rig.fresh_accelerate():
        if prepared:
            run = rig.Loop("qwen3_moe", rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy="llep")))
            run.train(1)
            model = run.model
        else:
            model = patched(tiny_model("qwen3_moe"), strategy="llep")
            loss_of(model, batch_of(dist.get_rank())).backward()
        return told(lambda: loss_of(model, batch_of(0)) if dist.get_rank() == 0 else None)


class Sleepy:
    """A communicator that sleeps for a while of its own before each call, and writes down what was called."""

    def __init__(self, comm: Any, seconds: float, trace: list[tuple[Any, ...]]) -> None:
        self.comm, self.seconds, self.trace = comm, seconds, trace
        self.random = random.Random(dist.get_rank())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.comm, name)
        if not callable(value) or name in ("watch", "to_host"):
            return value

        def called(*args: Any) -> Any:
            time.sleep(self.random.random() * self.seconds)
            where = self.comm.watch.where
            self.trace.append((name, where.layer, where.phase, where.micro_batch))
            return value(*args)

        return called


def sleepy(strategy: str, steps: int, nap: float = 0.001) -> dict[str, list[tuple[Any, ...]]]:
    """B09: eight layers under checkpointing, ranks that sleep now and then; returns each communicator's trace."""
    model = patched(tiny_model("qwen3_moe", num_hidden_layers=8), strategy=strategy, history=1)
    model.gradient_checkpointing_enable()
    engine = get_engine(model)
    assert engine is not None
    traces: dict[str, list[tuple[Any, ...]]] = {"tokens": [], "weights": []}
    made = {name: Sleepy(getattr(engine.comms, name), nap, traces[name]) for name in traces}
    engine.comms = replace(engine.comms, **made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return traces


def groups_made(folder: str, strategy: str) -> Counter[str]:
    """B10: process groups by what they are for, after setup; steps, clipping and saving make none."""
    known = set(groups._made.get(dist.group.WORLD, {}).values())
    with rig.fresh_accelerate():
        plugin = rig.fsdp_plugin(
            LaerFSDPPlugin, laer=rig.eager(strategy=strategy), state_dict_type="SHARDED_STATE_DICT"
        )
        run = rig.Loop("qwen3_moe", plugin, sizes={"num_hidden_layers": 4})
        made = set(dist.distributed_c10d._world.pg_map)
        run.train(2)
        run.accelerator.save_state(folder)
        assert set(dist.distributed_c10d._world.pg_map) == made
    ours = set(groups._made[dist.group.WORLD].values())
    assert ours <= made
    assert known <= ours
    return Counter(group.group_desc for group in made if group.group_desc.startswith("hf_laer"))


class _Spoilt(rig.Loop):
    """A loop in whose first step one expert's gradient is infinite on one rank, and which skips such steps."""

    def train(self, steps: int) -> dict[str, Any]:
        norms, skipped = [], []
        for step in range(steps):
            ids = batch_of(dist.get_rank(), step)
            self.accelerator.backward(self.model(input_ids=ids, labels=ids, use_cache=False).loss)
            if step == 1 and dist.get_rank() == 1:
                weight = self.model.model.layers[0].mlp.experts.down_proj
                weight.grad.to_local()[-1, -1, -1] = float("inf")
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            skipped.append(not np.isfinite(norms[-1]))
            if not skipped[-1]:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return {"grad_norm": norms, "skipped": skipped, "weights": rig.gathered(self.model)}


def spoilt(strategy: str) -> list[bool]:
    """B11: all ranks see the same norm, skip the same step, and go on as the unpatched model does."""
    settings = {"gradient_accumulation_steps": 1}
    with rig.fresh_accelerate():
        theirs = _Spoilt("qwen3_moe", rig.fsdp_plugin(), **settings).train(4)
    with rig.fresh_accelerate():
        made = rig.fsdp_plugin(LaerFSDPPlugin, laer=rig.eager(strategy=strategy))
        ours = _Spoilt("qwen3_moe", made, **settings).train(4)
    assert ours["skipped"] == theirs["skipped"]
    rig.assert_same(ours, theirs)
    return ours["skipped"]
