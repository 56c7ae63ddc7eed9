"""What the recipe shows while it trains and at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import progress
import pytest
import report
from rich.console import Console

from hf_laer import LaerConfig
from hf_laer.choice import Choice
from tests.telemetry.test_summary import drifting, record


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console(record=True, width=132, file=(tmp_path / "terminal").open("w"))


def test_report_writes_table_picture_and_numbers(tmp_path: Path, console: Console) -> None:
    report.report(drifting(), tmp_path / "run", console, strategy="llep")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"expert_load.json", "expert_load.png"}
    (numbers,) = json.loads((tmp_path / "run" / "expert_load.json").read_text())
    assert numbers["after_mean"] == 1.0
    text = console.export_text()
    assert "Expert load, llep" in text
    assert "No static layout would have shown 100% of the gain" in text


def test_report_says_how_each_layer_ran_and_why(tmp_path: Path, console: Console) -> None:
    left = Choice("fsdp2", None, "1.5 ms, ep 6")
    records = [record("layers.1.experts", 0, [10, 20])]
    choices = {"layers.0.experts": left, "layers.1.experts": Choice("llep", LaerConfig(), "2 ms, fsdp2 3.25")}
    report.report(records, tmp_path, console, strategy="auto", choices=choices)
    text = console.export_text()
    assert re.search(r"layers.0 +│ fsdp2 .* 1.5 ms, ep 6 ", text)
    assert re.search(r"layers.1 +│ .* 2 ms, fsdp2 3.25 ", text)
    assert report.LEFT not in " ".join(text.split())
    report.report([], tmp_path, console, strategy="auto", choices={"layers.0.experts": left})
    assert report.LEFT in " ".join(console.export_text().split())


def test_verdict_admits_that_a_static_layout_would_do() -> None:
    records = [record("experts", step, [30, 30, 10, 10], after=[40, 40]) for step in range(4)]
    assert "a better static layout would have done as well" in report.verdict(report.summarize(records))


def test_verdict_where_nothing_moved() -> None:
    records = [record("experts", step, [40, 20, 10, 10]) for step in range(2)]
    text = report.verdict(report.summarize(records))
    assert text.startswith("The fullest rank had 1.50 times the mean load, and nothing was moved")
    assert "would have had 1.25" in text
    assert "gain" not in text


def test_verdict_where_nothing_was_unequal() -> None:
    even = [record("experts", step, [10, 10]) for step in range(2)]
    assert "There was nothing to balance" in report.verdict(report.summarize(even))


def test_report_without_records(tmp_path: Path, console: Console) -> None:
    report.report([], tmp_path, console, strategy="llep")
    assert json.loads((tmp_path / "expert_load.json").read_text()) == []


def test_a_demonstration_in_which_nothing_moved_fails() -> None:
    report.check_moves(drifting(), "llep")
    with pytest.raises(RuntimeError, match="spilled no token and moved no replica in 1 records"):
        report.check_moves([record("experts", 0, [1, 2])], "ep")


def test_progress_shows_logs_and_counts_tokens(console: Console) -> None:
    callback = progress.ProgressCallback(console)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=2, global_step=1, log_history=[{}])
    callback.on_train_begin(None, state, None)
    callback.on_step_end(None, state, None)
    logs = {"loss": 1.5, "num_tokens": 100.0, "laer/spilled": 7}
    callback.on_log(None, state, None, logs=logs)
    callback.on_log(None, state, None, logs={"train_runtime": 3.0})
    callback.on_train_end(None, state, None)
    assert logs["tokens_per_second"] > 0
    assert state.log_history[-1]["tokens_per_second"] == logs["tokens_per_second"]
    assert "loss 1.500" in console.export_text()


def test_log_line_keeps_to_what_is_there() -> None:
    assert progress.log_line({"laer/moved": 3, "loss": 2.0, "other": 1}) == "loss 2.000  moved 3"
