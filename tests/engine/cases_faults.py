"""Cases for faults that were found by trying to break the engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_laer import LaerConfig, is_patched, patch_model
from hf_laer.compute.segments import Part
from hf_laer.integrations.transformers import get_engine
from tests.engine.cases import batch_of, loss_of, patched, world_mesh
from tests.models import assert_close, full, tiny_model


def hooks_run_once(uses: int) -> list[bool]:
    """A post-accumulate hook: once per backward however often the layer is used, and with the gradient."""
    model = patched(tiny_model("mixtral"), strategy="llep")
    weight = model.model.layers[0].mlp.experts.down_proj
    calls: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    torch.stack([loss_of(model, batch_of(dist.get_rank(), step)) for step in range(uses)]).sum().backward()
    return calls


def inference_first() -> None:
    """An evaluation in inference mode leaves nothing that training trips over."""
    for strategy in ("llep", "fsep"):
        model = patched(tiny_model("mixtral"), strategy=strategy)
        with torch.inference_mode():
            loss_of(model, batch_of(dist.get_rank()))
        loss_of(model, batch_of(dist.get_rank())).backward()


def failed_patch() -> None:
    """Impossible settings leave the plain model, which can be patched then."""
    model = tiny_model("mixtral")
    names = [name for name, _ in model.named_parameters()]
    for settings, word in (({"group_size": 3}, "group_size"), ({"strategy": "fsep", "slots_per_rank": 1}, "slots")):
        with pytest.raises(ValueError, match=word):
            patch_model(model, LaerConfig(**settings), mesh=world_mesh())
        assert not is_patched(model)
        assert [name for name, _ in model.named_parameters()] == names
    patched(model, strategy="llep")
    loss_of(model, batch_of(dist.get_rank())).backward()


def partial_mesh() -> str:
    """A mesh that leaves ranks out is refused rather than waited for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))["shard"]
    try:
        patch_model(tiny_model("mixtral"), mesh=mesh)
    except ValueError as error:
        return str(error)
    return "no error"


def told_differently() -> str:
    """Ranks with other settings than rank 0 are refused."""
    config = LaerConfig(ranks_per_node=1 + dist.get_rank())
    try:
        patch_model(tiny_model("mixtral"), config, mesh=world_mesh())
    except ValueError as error:
        return str(error)
    return "no error"


def modified_between() -> str:
    """Parameters changed between forward and backward raise, as in plain PyTorch."""
    model = patched(tiny_model("mixtral"), strategy="llep")
    loss = loss_of(model, batch_of(dist.get_rank()))
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def half_sum() -> None:
    """fp16: a sum that overflows where its mean does not."""
    model = patched(tiny_model("mixtral", dtype=torch.float16), strategy="llep", reduce_dtype="float32")
    block = model.model.layers[0].mlp.experts
    for name, parameter in block.named_parameters():
        local = parameter.to_local()
        engine = get_engine(model)
        assert engine is not None
        home = next(iter(engine.layers.values())).homes[name]
        large = torch.full_like(local, 40000)
        home.accumulate([Part.whole(large), Part.whole(large.clone())], 0.5)
        assert parameter.grad is not None
        assert_close(full(parameter.grad).float(), torch.full(parameter.shape, 40000.0), name, 1e-3)


def optimizer_before() -> None:
    """An optimizer made before holds the sharded parameters at once."""
    model = tiny_model("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patched(model, strategy="llep")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    loss_of(model, batch_of(dist.get_rank())).backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
