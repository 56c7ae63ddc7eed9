"""Summaries, the best static layout, the table and the picture, on records made by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hf_laer.telemetry import plot, summary, table
from hf_laer.telemetry.record import LayerRecord


def record(layer: str, step: int, loads: list[int], *, after: list[int] | None = None, spilled: int = 0) -> LayerRecord:
    """Two ranks; the first half of the experts belongs to rank 0."""
    half = len(loads) // 2
    before = np.array([sum(loads[:half]), sum(loads[half:])])
    planned = before if after is None else np.array(after)
    return LayerRecord(layer, step, np.array(loads), before, planned, spilled, int(spilled > 0), 0.002)


def drifting(layer: str = "model.layers.3.mlp.experts") -> list[LayerRecord]:
    """The hot pair changes each micro-batch, so that no static layout fits both."""
    loads = [[30, 30, 10, 10], [30, 10, 30, 10], [30, 10, 10, 30]]
    return [record(layer, step, loads[step % 3], after=[40, 40], spilled=20) for step in range(6)]


def test_summary_of_one_layer() -> None:
    (found,) = summary.summarize(drifting())
    assert found.batches == 6
    assert found.tokens == 480
    assert found.before_max == pytest.approx(1.5)
    assert found.before_mean == pytest.approx((1.5 + 1.0 + 1.0) / 3)
    assert (found.after_mean, found.after_max) == (1.0, 1.0)
    assert found.spilled == pytest.approx(6 * 20 / 480)
    assert found.moved == 6
    assert found.plan_ms == pytest.approx(2.0)
    assert found.expert_imbalance == pytest.approx(1.5)
    # Each of the three layouts puts the hot pair of one micro-batch in three on one rank.
    assert found.static_mean == pytest.approx((1.5 + 1.0 + 1.0) / 3)


def test_static_layout_wins_what_it_can() -> None:
    records = [record("experts", step, [30, 30, 10, 10]) for step in range(4)]
    (found,) = summary.summarize(records)
    assert (found.before_mean, found.static_mean) == (1.5, 1.0)


def test_layers_keep_their_order_and_steps_are_sorted() -> None:
    records = [record("b", 1, [1, 2]), record("a", 0, [1, 2]), record("b", 0, [3, 4])]
    found = summary.by_layer(records)
    assert list(found) == ["b", "a"]
    assert [each.step for each in found["b"]] == [0, 1]
    assert summary.summarize([]) == []


def test_no_tokens_is_balanced() -> None:
    (found,) = summary.summarize([record("experts", 0, [0, 0, 0, 0])])
    assert (found.before_mean, found.after_mean, found.static_mean, found.spilled) == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(("experts", "ranks"), [(4, 2), (8, 2), (5, 3), (6, 4)])
def test_best_static_layout_against_every_layout(experts: int, ranks: int) -> None:
    loads = np.random.default_rng(experts).integers(0, 100, (5, experts))
    room = -(-experts // ranks)

    def cost(layout: tuple[int, ...]) -> float:
        return float(summary.imbalances(summary.rank_loads(loads, np.array(layout), ranks)).mean())

    every = (c for c in itertools.product(range(ranks), repeat=experts) if max(map(c.count, range(ranks))) <= room)
    found = summary.best_static_layout(loads, ranks)
    assert np.bincount(found, minlength=ranks).max() <= room
    assert cost(tuple(found)) == pytest.approx(min(map(cost, every)), rel=0.02)


def test_best_static_layout_of_many_experts_is_better_than_the_owners() -> None:
    loads = np.random.default_rng(0).pareto(1.5, 32) * 100 + np.random.default_rng(1).random((10, 32))
    loads = loads.astype(np.int64)
    owners = np.repeat(np.arange(8), 4)
    found = summary.best_static_layout(loads, 8)
    assert np.bincount(found).tolist() == [4] * 8
    worse = summary.imbalances(summary.rank_loads(loads, owners, 8)).mean()
    assert summary.imbalances(summary.rank_loads(loads, found, 8)).mean() < worse


def test_table_shows_layers_and_their_mean() -> None:
    console = Console(record=True, width=140, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(table.layer_table(summary.summarize([*drifting(), *drifting("model.layers.4.mlp.experts")])))
    text = console.export_text()
    assert "layers.3" in text
    assert "1.17 (1.50)" in text
    assert "25.0%" in text
    assert table.layer_table([]).row_count == 0


@pytest.mark.parametrize(
    ("name", "short"),
    [("model.layers.7.mlp.experts", "layers.7"), ("experts", "experts"), ("0.experts", "0")],
)
def test_short_names(name: str, short: str) -> None:
    assert table.short_name(name) == short


def test_picture(tmp_path: Path) -> None:
    path = plot.save_picture(drifting(), tmp_path / "new" / "load.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["load.png"]
    many = [record("experts", step, [step + 1] * 20) for step in range(2)]
    assert len(plot.load_figure(many).axes) == 3
    assert len(plot.load_figure(many[:1]).axes) == 3


def test_picture_needs_records() -> None:
    with pytest.raises(ValueError, match="train at least one step"):
        plot.load_figure([])
    with pytest.raises(ValueError, match="layer='x' has no records; known: experts"):
        plot.load_figure([record("experts", 0, [1, 2])], layer="x")
