"""Reports on planners, the simulator and the numbers that are logged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hf_laer.bench.routing import routing
from hf_laer.cli.main import main
from hf_laer.integrations.trl import LaerCallback
from hf_laer.plan import (
    EMPTY,
    CostModel,
    Placement,
    chunk_owners,
    ep,
    eplb_placement,
    fsep_placement,
    imbalance,
    initial_placement,
    laer_placement,
    topology,
)
from hf_laer.sim import Setting, Trace, replay
from hf_laer.telemetry.record import LayerRecord
from tests.plan.oracles import check_plan
from tests.reports import cases_planning
from tests.reports.cases_planning import every_plan


def copies(placement: Placement, experts: int) -> list[int]:
    slots = placement.slots
    return np.bincount(slots[slots != EMPTY], minlength=experts).tolist()


def test_b42_a_hot_expert_once_per_rank() -> None:
    """Uncapped, a greedy rule makes five copies for four ranks."""
    load = np.array([90, 10, 0, 0])
    for placement in (laer_placement(load, 4, 2), eplb_placement(load, 4, 2)):
        assert copies(placement, 4) == [4, 2, 1, 1]
        assert ((placement.slots == 0).sum(axis=1) == 1).all()
        shares = (load / copies(placement, 4))[placement.slots].sum(axis=1)
        assert sorted(shares, reverse=True) == [27.5, 27.5, 22.5, 22.5]
    for row in fsep_placement(load, 4, 2).slots.tolist():
        assert len(set(row)) == 2


@pytest.mark.parametrize("experts", [4, 6, 30, 128])
def test_b43_sizes_that_divide_nothing(experts: int) -> None:
    """A valid plan of every planner, or an error that names the numbers."""
    for ranks in (1, 2, 3, 4, 6, 8):
        loads = np.random.default_rng(ranks).integers(0, 9, (ranks, experts))
        share = -(-experts // ranks)
        for nodes, slots in ((1, share), (2, share + 1), (2, 2 * share + 1)):
            for name, plan in every_plan(loads, min(slots, experts), -(-ranks // nodes)).items():
                check_plan(plan, loads)
                assert min(copies(plan.placement, experts)) > 0, name
        if share > 1:
            with pytest.raises(ValueError, match=f"{share - 1} slots .* {ranks} ranks .* there are {experts}: give"):
                every_plan(loads, share - 1, ranks)


def test_b43_thirty_experts_on_eight_ranks() -> None:
    """Slots that are re-laid out differ by one at most; owners follow DTensor's chunks, as their parameters do."""
    assert (initial_placement(30, 8, 4).slots != EMPTY).sum(axis=1).tolist() == [4, 4, 4, 4, 4, 4, 3, 3]
    assert np.bincount(chunk_owners(30, 8)).tolist() == [len(c) for c in torch.arange(30).chunk(8)]
    assert np.bincount(chunk_owners(30, 8)).tolist() == [4, 4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("what", ["nothing", "one expert's", "a single expert"])
def test_b45_loads_of_nothing(what: str) -> None:
    experts = 1 if what == "a single expert" else 6
    loads = np.zeros((4, experts), np.int64)
    if what != "nothing":
        loads[:, experts // 2] = (0, 7, 90, 3)
    for name, plan in every_plan(loads, min(3, experts), 2).items():
        check_plan(plan, loads)
        assert np.isfinite(imbalance(plan.rank_loads)), name
        assert what != "nothing" or imbalance(plan.rank_loads) == 1.0


def test_b45_a_layer_without_tokens_and_bad_loads() -> None:
    loads = np.random.default_rng(0).integers(0, 50, (6, 2, 4, 6))
    loads[:, 1] = 0
    setting = Setting(CostModel(topology("h200", 2, 2), 64, 48, 2), experts=6, slots=2)
    for name in ("ep", "llep", "eplb", "fsep+llep"):
        done = replay(Trace(loads), name, setting)
        assert (done.values["imbalance"][:, 1] == 1.0).all()
        assert all(np.isfinite(values).all() for values in done.values.values())
    for bad, message in ((np.nan, "finite"), (-1.0, "negative: rank 1, expert 2 has -1"), (0.5, "whole")):
        broken = np.ones((4, 6))
        broken[1, 2] = bad
        with pytest.raises(ValueError, match=message):
            every_plan(broken, 2, 2)


def test_b46_ties_give_one_plan_everywhere(ranks) -> None:
    """Here and on two ranks (each with a hash seed of its own), with one thread and with eight, again and again."""
    want = cases_planning.digests(repeats=20, threads=1)
    assert len({digest.split()[1] for digest in want}) > 8, "the planners differ"
    assert ranks(2).run(cases_planning.digests, repeats=20, threads=8) == [want, want]
    tensor = torch.tensor(cases_planning.tied_and_drawn()[1], dtype=torch.int32)
    owners = chunk_owners(20, 8)
    assert ep(tensor, owners).digest() == ep(tensor.numpy().astype(np.int64), owners).digest()


def test_b53_counts_beyond_int32(tmp_path) -> None:
    """3e9 tokens per rank and expert; 64 experts of 4096 x 14336."""
    loads = np.full((8, 64), 3_000_000_000)
    loads[:, 0] *= 5
    for plan in every_plan(loads, 10, 4).values():
        check_plan(plan, loads)
    assert 64 * CostModel(topology("h200", 1, 8), 4096, 14336, 2).expert_bytes == 3 * 2 * 3_758_096_384
    small = (loads // 3).astype(np.int32)
    for name, plan in every_plan(small, 10, 4).items():
        assert plan.digest() == every_plan(small.astype(np.int64), 10, 4)[name].digest()
    Trace(np.stack([loads[None]] * 3), {"top_k": 2, "hidden": 4096, "intermediate": 14336}).save(tmp_path / "t.npz")
    argv = ["simulate", "--trace", str(tmp_path / "t.npz"), "--planner", "ep,fsep+llep", "--experts-per-rank", "10"]
    assert main([*argv, "--nodes", "2", "--gpus-per-node", "4", "--json", str(tmp_path / "t.json")]) == 0
    table = json.loads((tmp_path / "t.json").read_text())
    assert all(value >= 0 for row in table.values() for value in row.values())
    assert table["ep"]["imbalance_mean"] == pytest.approx((7 + 5) * 8 / 68)


def test_b54_the_balanced_baseline_is_balanced() -> None:
    chosen = [routing("balanced", 16, 64, 2, rank, torch.device("cpu")) for rank in range(8)]
    loads = np.stack([np.bincount(one.flatten().numpy(), minlength=64) for one in chosen])
    assert np.ptp(ep(loads, chunk_owners(64, 8)).rank_loads) <= 1
    assert (loads.sum(axis=0) > 0).all()
    assert len({tuple(one.flatten().tolist()) for one in chosen}) == 8


def test_b55_few_numbers_whatever_the_model() -> None:
    def logged(counts: list[int], layers: int) -> dict[str, float]:
        callback = LaerCallback()
        loads = np.array(counts)
        for layer in range(layers):
            callback._window.add(LayerRecord(f"layers.{layer}", 0, loads, loads[:2], loads[:2], 0, 0, 0.0))
        logs: dict[str, float] = {"loss": 1.0}
        callback.add_to(logs, type("State", (), {"log_history": []}))
        return logs

    few = logged([6, 2, 0, 0], 1)
    assert few["laer/expert_imbalance"] == 3.0
    assert few["laer/experts_active"] == 0.5
    many = logged([5] * 64 + [0] * 64, 48)
    assert many.keys() == few.keys()
    assert len(few) <= 10
    assert (many["laer/expert_imbalance"], many["laer/experts_active"]) == (2.0, 0.5)
