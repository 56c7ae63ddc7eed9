"""A suite's figures as pictures. Matplotlib is imported only here, and draws to files without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_laer.bench.suite.cells import Kept
from hf_laer.bench.suite.report import hot_cells, sweep_points
from hf_laer.telemetry.plot import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(cells: Sequence[Kept], folder: Path) -> list[str]:
    """Draws what has been measured; the names of the files in ``folder``.

    Raises:
        ImportError: Matplotlib is missing (``pip install 'hf_laer[plots]'``).
    """
    names = []
    for name, picture in _PICTURES.items():
        figure = picture(cells)
        if figure is not None:
            names.append(save_figure(figure, folder / f"{name}.png").name)
    return names


def _new(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _figure4(cells: Sequence[Kept]) -> Figure | None:
    found = [one for one in hot_cells(cells) if one.hot]
    if not found:
        return None
    layers = list(dict.fromkeys(one.layer for one in found))
    figure = _new(11, 3.2 * len(layers))
    for axes, layer in zip(_column(figure, len(layers)), layers, strict=True):
        mine = sorted((one for one in found if one.layer == layer), key=lambda one: (one.hot, one.share))
        places = range(len(mine))
        axes.bar([at - 0.2 for at in places], [one.speedup for one in mine], 0.4, label="llep over ep, forward")
        axes.bar([at + 0.2 for at in places], [one.step_speedup for one in mine], 0.4, label="forward and backward")
        axes.plot(places, [one.bound for one in mine], "k_", markersize=24, label="load bound")
        axes.set_xticks(places, [f"{one.share:.0%} on {one.hot}" for one in mine], fontsize="small")
        axes.set(title=layer, ylabel="speed-up")
        axes.legend(fontsize="small")
    return figure


def _sweep(cells: Sequence[Kept]) -> Figure | None:
    points = sweep_points(cells)
    if not points:
        return None
    axes_names = list(dict.fromkeys(point[0] for point in points))
    figure = _new(11, 3 * len(axes_names))
    for axes, axis in zip(_column(figure, len(axes_names)), axes_names, strict=True):
        for routing in dict.fromkeys(point[2] for point in points):
            line = [(value, step) for what, value, where, _, step in points if (what, where) == (axis, routing)]
            axes.plot(*zip(*line, strict=True), "o-", label=routing)
        axes.axhline(1.0, color="black", linewidth=0.5)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=axis, ylabel="ep / llep, step")
        axes.legend(fontsize="small")
    return figure


def _relayout(cells: Sequence[Kept]) -> Figure | None:
    return _bars(
        cells, "relayout", lambda about: f"{about['layer']}, {about['routing']}", "contender", "step_ms", "step, ms"
    )


def _model(cells: Sequence[Kept]) -> Figure | None:
    return _bars(cells, "model", lambda about: about["model"], "routing", "tokens_per_second", "tokens/s per GPU")


def _bars(
    cells: Sequence[Kept], part: str, group: Callable[[dict[str, Any]], str], along: str, key: str, label: str
) -> Figure | None:
    """One picture per group of cells: bars of ``key`` along the contenders, or, for each of these, along routings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if cell.part == part and cell.rows:
            groups.setdefault(group(cell.about), []).extend(cell.rows)
    if not groups:
        return None
    figure = _new(11, 3 * len(groups))
    for axes, (title, rows) in zip(_column(figure, len(groups)), groups.items(), strict=True):
        names = [row["contender"] if along == "contender" else f"{row['contender']}\n{row['routing']}" for row in rows]
        axes.bar(range(len(rows)), [row[key] for row in rows])
        axes.set_xticks(range(len(rows)), names, fontsize="small")
        axes.set(title=title, ylabel=label)
    return figure


def _column(figure: Figure, count: int) -> list[Any]:
    return list(figure.subplots(count, 1, squeeze=False)[:, 0])


_PICTURES: dict[str, Callable[[Sequence[Kept]], Figure | None]] = {
    "figure4": _figure4,
    "sweep": _sweep,
    "relayout": _relayout,
    "model": _model,
}
