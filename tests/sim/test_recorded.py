"""Routing recorded from a real training run, replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hf_laer.plan import CostModel
from hf_laer.plan.topology import topology
from hf_laer.sim.methods import Setting
from hf_laer.sim.replay import replay
from hf_laer.sim.trace import Trace, load_trace

FOLDER = Path(__file__).parents[2] / "docs" / "traces"


@pytest.mark.parametrize(("experts", "nodes", "slots"), [(8, 1, 2), (8, 4, 2), (64, 1, 10), (64, 4, 3)])
def test_fsep_llep_levels_recorded_routing(experts: int, nodes: int, slots: int) -> None:
    """Sixteen times the recorded tokens (16,384 per rank) and the experts of a large model, or nothing would pay."""
    recorded = load_trace(FOLDER / f"smollm2_{experts}.npz")
    hidden, intermediate = (4096, 14336) if experts == 8 else (2048, 1408)
    costs = CostModel(topology("h200", nodes, 8), hidden, intermediate, int(recorded.meta["top_k"]))
    setting = Setting(costs, experts=experts, slots=slots, min_tokens=1)
    trace = Trace(recorded.loads * 16, recorded.meta)
    static, late, ours = (replay(trace, name, setting, warmup=3) for name in ("ep", "llep", "fsep+llep"))
    values = ours.values["imbalance"]
    assert static.mean("imbalance") > 2
    assert values.mean() <= 1.05
    assert np.percentile(values, 95) <= 1.15
    assert ours.mean("seconds") < 0.65 * static.mean("seconds")
    assert ours.mean("seconds") < late.mean("seconds")
    assert 0 < ours.mean("late") < 0.1 * late.mean("late")
