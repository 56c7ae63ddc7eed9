"""``hf-laer bench layer`` runs on any ranks; its rivals compute what the engine computes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_laer.bench.layer import Batch, Bench, LayerShape
from hf_laer.bench.routing import routing
from hf_laer.bench.stack import StackBench
from hf_laer.cli.bench_layer import ALL_RIVALS
from hf_laer.cli.main import main
from hf_laer.comm.process_group import ProcessGroupCommunicator
from tests.models import assert_close, full

SMALL = ["--experts", "6", "--hidden", "8", "--intermediate", "12", "--top-k", "2", "--tokens", "32"]
WHO = ["--contenders", "auto,llep,fsep+llep,fsep+llep:whole,hf_a2a,fsdp_gather,gemm"]


def run_command(path: str) -> int:
    """The command on every rank of a pool."""
    return main(
        [
            "bench",
            "layer",
            *SMALL,
            "--routing",
            "balanced,80:2,zipf,drift:0.9",
            *WHO,
            "--iterations",
            "2",
            "--json",
            path,
        ]
    )


def run_stack(path: str) -> int:
    """``bench stack`` on every rank of a pool."""
    flags = ["--layers", "2", "--length", "16", "--routing", "balanced,80:2", "--iterations", "2", "--json", path]
    return main(["bench", "stack", *SMALL, *flags])


def stacks_are_equal(contender: str, reshard: bool = True) -> None:
    """Ours and FSDP2's: output, input gradient, and those of attention and experts; nothing once it is stubbed."""
    shape = LayerShape(experts=6, hidden=8, intermediate=12, top_k=2, tokens=32, layers=2)
    settings = {"min_tokens_per_gemm": 1, "reshard_after_forward": reshard}
    bench = StackBench(shape, 16, torch.device("cpu"), torch.float32, settings=settings)
    made = [bench._made(name) for name in (contender, "fsdp2")]
    batch, results = Batch(shape, "zipf", torch.device("cpu"), torch.float32), []
    weights = [dict(one.stack.named_parameters()) for one in made]
    for name, ours in weights[0].items():
        theirs = weights[1][name]
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        with torch.no_grad():
            theirs.copy_(distribute_tensor(ours.full_tensor(), theirs.device_mesh, theirs.placements))
    for one in made:
        one.step(batch)
        assert batch.hidden.grad is not None
        results.append([batch.hidden.grad.clone(), *(full(weight.grad) for weight in one.weights)])
    for us, them in zip(*results, strict=True):
        assert_close(us, them, "stack")
    ours = made[0]
    assert ours.unsharder is not None
    assert ours.engine is not None
    assert set(ours.unsharder.wants) == {"blocks.0", "blocks.1"}
    sent = []
    for ours.unsharder.stubbed in (False, True):
        with patch.object(
            type(ours.engine.comms.weights), "start_all_to_all", autospec=True, side_effect=_counted
        ) as calls:
            ours.step(batch)
        sent.append(sum(call.args[0] is ours.engine.comms.weights for call in calls.call_args_list))
    # What is left are the gradients on their way home. The last layer's backward finds its experts in the slots, or all
    # layers' do.
    if contender == "fsep":
        assert (sent[0] - sent[1], sent[1]) == (3 if reshard else 2, 2)


_counted = ProcessGroupCommunicator.start_all_to_all


def rival_equals_engine(name: str) -> None:
    """A rival and FSDP's corner: output and input gradient; also where tokens name an expert twice."""
    shape = LayerShape(experts=6, hidden=8, intermediate=12, top_k=2, tokens=32)
    bench = Bench(shape, torch.device("cpu"), torch.float32, ALL_RIVALS)
    ours, rival = bench.contender("fsdp"), bench.contender(name)
    assert ours.engine is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    homes = ours.engine.layers["experts.0"].homes
    for weight, name in zip(rival.weights, ("gate_up_proj", "down_proj"), strict=True):
        full = homes[name].parameter.detach().full_tensor()
        (weight.to_local() if isinstance(weight, DTensor) else weight).data.copy_(full.chunk(size)[rank])
    for scenario in ("zipf", "choices:80:1"):
        index = routing(scenario, shape.tokens, shape.experts, shape.top_k, rank, torch.device("cpu"))
        hidden, gates = torch.randn(shape.tokens, shape.hidden), torch.rand(index.shape)
        results = []
        for contender in (ours, rival):
            leaf = hidden.clone().requires_grad_()
            out = contender.run(leaf, [index], gates)
            out.square().sum().backward()
            results.append((out.detach(), leaf.grad))
        for us, them in zip(*results, strict=True):
            assert_close(us, them, f"rival, {scenario}")


def test_bench_layer(ranks, tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    assert ranks(2).run(run_command, path=str(path)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 28
    assert all(row["step_ms"] > 0 for row in rows)
    hot = next(row for row in rows if row["contender"] == "llep" and row["routing"] == "80:2")
    assert hot["imbalance_before"] > 1.3
    assert not list(tmp_path.glob("*.tmp"))


def test_bench_stack(ranks, tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    assert ranks(2).run(run_stack, path=str(path)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows[:2]] == ["attention", "gemm"]
    assert len(rows) == 10
    travels = {row["contender"] for row in rows if row["unshard_ms"] > 0}
    assert "fsep" in travels
    assert "fsdp2" not in travels


@pytest.mark.parametrize(("contender", "reshard"), [("fsep", True), ("llep", True), ("fsep", False)])
def test_stacks_are_equal(ranks, contender: str, reshard: bool) -> None:
    ranks(2).run(stacks_are_equal, contender=contender, reshard=reshard)


def test_bench_kernels(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    flags = ["--routing", "balanced,80:2", "--iterations", "2", "--json", str(path)]
    assert main(["bench", "kernels", *SMALL, *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["routing"] for row in rows} == {"", "balanced", "80:2"}
    assert len({(row["kernel"], row["routing"]) for row in rows}) == len(rows) == 2 + 4 + 4 + 2 * (5 + 6)
    assert all(row["ms"] > 0 and row["of_limit"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["fsdp_gather", "fsdp2", "hf_a2a"])
def test_rival_equals_engine(ranks, name: str) -> None:
    ranks(2).run(rival_equals_engine, name=name)


def train_command(path: str) -> int:
    """Whole training steps of the tiny model on every rank of a pool."""
    who = ["--contenders", "auto,llep,fsep+llep,fsdp2,native_ep,no_experts", "--routing", "balanced,80:2"]
    sizes = ["--model", "tiny", "--num-layers", "2", "--rows", "2", "--length", "9", "--steps", "1"]
    return main(["bench", "sft", *who, *sizes, "--slots-per-rank", "4", "--json", path])


def test_bench_sft(ranks, tmp_path: Path) -> None:
    path = tmp_path / "sft.json"
    assert ranks(2).run(train_command, path=str(path)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    trained = {"auto", "llep", "fsep+llep", "fsdp2", "native_ep"}
    assert {row["contender"] for row in rows} == trained | {"no_experts"}
    # So small a model is the host's: by the figures shipped for CPUs, FSDP2's.
    assert {row["chosen"] for row in rows if row["contender"] == "auto"} == {"fsdp2"}
    for routing_name in ("balanced", "80:2"):
        # One model, one batch, one routing: so one loss.
        losses = {row["contender"]: row["loss"] for row in rows if row["routing"] == routing_name}
        without = losses.pop("no_experts")
        assert list(losses.values()) == pytest.approx([losses["fsdp2"]] * len(trained), rel=1e-5)
        assert without != pytest.approx(losses["fsdp2"], rel=1e-5)


def test_balanced_routing_is_balanced() -> None:
    chosen = [routing("balanced", 16, 64, 2, rank, torch.device("cpu")) for rank in range(8)]
    counts = torch.stack([torch.bincount(c.reshape(-1), minlength=64) for c in chosen])
    assert counts.sum(0).tolist() == [4] * 64
    assert len({tuple(c.reshape(-1).tolist()) for c in chosen}) == 8


@pytest.mark.parametrize(
    "arguments", [["--routing", "80:1"], ["--routing", "often"], ["--contenders", "us"], ["--layers", "2"]]
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *SMALL, *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err
