"""Traces recorded while models train: equal to what the routers chose, on every rank, and fit to be simulated."""

from __future__ import annotations

import numpy as np
import pytest

from hf_laer import LaerConfig, patch_model, record_trace, unpatch_model
from hf_laer.cli.main import main
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from hf_laer.sim import load_trace
from tests.engine.cases import batch_of, loss_of
from tests.integrations import cases_recording
from tests.models import tiny_model

RUNS = {
    "hsdp": ((2, 2), {"strategy": "llep"}),
    "groups": ((4,), {"strategy": "fsep", "group_size": 2, "slots_per_rank": 5}),
    "fsdp": ((4,), {"strategy": "fsdp"}),
}


def test_the_callback_records_what_the_routers_chose(ranks, tmp_path, capsys) -> None:
    counted = np.stack(ranks(2).run(cases_recording.by_callback, folder=str(tmp_path)), axis=2)
    trace = load_trace(tmp_path / "trace.npz")
    assert counted.shape == (6, 2, 2, 7)
    np.testing.assert_array_equal(trace.loads, counted)
    told = {"hidden": 34, "intermediate": 25, "top_k": 2, "ranks_per_node": 2, "nodes": 1, "strategy": "fsep"}
    assert told.items() <= trace.meta.items()
    assert len(trace.meta["layers"]) == 2
    assert not list(tmp_path.glob("*.tmp"))
    assert main(["simulate", "--trace", str(tmp_path / "trace.npz"), "--planner", "ep,fsep+llep"]) == 0
    assert "1 nodes x 2 ranks" in capsys.readouterr().out


def test_by_hand_on_every_kind_of_mesh(ranks, tmp_path) -> None:
    """HSDP, token groups, and a strategy that itself gathers no loads; all ranks of the world are in the file."""
    results = ranks(4).run(cases_recording.all_by_hand, folder=str(tmp_path), runs=RUNS)
    for name in RUNS:
        trace = load_trace(tmp_path / f"{name}.npz")
        np.testing.assert_array_equal(trace.loads, np.stack([result[name] for result in results], axis=2), name)
        assert trace.loads.shape == (3, 2, 4, 7)
        assert trace.meta["ranks_per_node"] == trace.meta["nodes"] == 2
        assert trace.meta["replicas"] == (2 if name == "hsdp" else 1)
        assert (trace.meta["intermediate"], trace.meta["top_k"]) == (25, 3)


def test_one_process_and_bounded_memory(tmp_path) -> None:
    model = patch_model(tiny_model("mixtral"), LaerConfig(strategy="fsep"))
    recording = record_trace(model, tmp_path / "new" / "trace.npz", max_bytes=2 * 2 * 7 * 4)
    for step in range(5):
        loss_of(model, batch_of(0, step)).backward()
    with pytest.raises(ValueError, match="recorded already"):
        record_trace(model, tmp_path / "other.npz")
    recording.stop()
    trace = load_trace(tmp_path / "new" / "trace.npz")
    assert trace.loads.shape == (2, 2, 1, 7)
    assert trace.meta["first_step"] == 3
    assert get_engine(model).watcher is None


def test_what_cannot_be_recorded(tmp_path, caplog) -> None:
    with pytest.raises(ValueError, match=r"trace='trace\.csv' must end in \.npz"):
        LaerCallback(trace="trace.csv")
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="call patch_model first"):
        record_trace(model, tmp_path / "trace.npz")
    patch_model(model)
    with record_trace(model, tmp_path / "trace.npz") as recording, pytest.raises(ValueError, match="no step"):
        recording.save()
    assert "nothing is written" in caplog.text
    assert not list(tmp_path.iterdir())
    unpatch_model(model)
