"""A report of replays: one picture, as PNG or inside one HTML file. Needs the ``plots`` extra."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .replay import Replay

PARTS = (("compute", "compute"), ("exchange", "tokens"), ("weights_exposed", "weights, exposed"))


def write_report(
    path: str | Path,
    replays: Sequence[Replay],
    loads: np.ndarray,
    scaling: Mapping[str, Mapping[int, Replay]],
    title: str,
) -> None:
    """Writes ``.png`` or ``.html``: heat maps of expert and rank loads, step times, their parts, and scaling.

    Args:
        path: Where to; the suffix decides.
        replays: What was replayed; at least one.
        loads: int64 ``[steps, N, E]``, layer 0.
        scaling: Replays by method and number of ranks; may be empty.
        title: One line above all.

    Raises:
        ValueError: Another suffix, nothing replayed, or matplotlib is missing.
    """
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise ValueError(f"a report is .png or .html, not {path.name!r}")
    if not replays:
        raise ValueError("nothing was replayed")
    picture = _picture(replays, loads, scaling, title)
    if path.suffix == ".png":
        path.write_bytes(picture)
        return
    data = base64.b64encode(picture).decode("ascii")
    path.write_text(
        "<!doctype html><meta charset='utf-8'><title>hf-laer simulate</title>"
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1>{_html_table(replays)}"
        f"<p><img alt='loads and times' src='data:image/png;base64,{data}'></p>",
        encoding="utf-8",
    )


def _html_table(replays: Sequence[Replay]) -> str:
    heads = ("planner", "max/mean", "p95", "ms", "compute", "tokens", "weights", "hidden", "% of ideal", "GB")
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for one in replays:
        times = ("seconds", "compute", "exchange", "weights_exposed", "weights_hidden")
        cells = [
            html.escape(one.name),
            f"{one.mean('imbalance'):.2f}",
            f"{one.percentile('imbalance', 95):.2f}",
        ]
        cells += [f"{1e3 * one.mean(name):.2f}" for name in times]
        cells += [f"{100 * one.of_ideal:.0f}", f"{one.percentile('peak_bytes', 100) / 1e9:.2f}"]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _picture(
    replays: Sequence[Replay], loads: np.ndarray, scaling: Mapping[str, Mapping[int, Replay]], title: str
) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a report needs matplotlib: pip install 'hf_laer[plots]'") from error
    figure = Figure(figsize=(15, 13), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(3, 2)
    _heat(figure.add_subplot(grid[0, 0]), loads.sum(axis=1).T, "expert", "tokens per expert (layer 0)")
    _rank_heat(figure.add_subplot(grid[0, 1]), replays)
    _lines(figure.add_subplot(grid[1, :]), replays)
    _bars(figure.add_subplot(grid[2, 0]), replays)
    _scaling(figure.add_subplot(grid[2, 1]), scaling)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return out.getvalue()


def _heat(axes: Any, values: np.ndarray, ylabel: str, title: str) -> None:
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="magma")
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.figure.colorbar(image, ax=axes)


def _rank_heat(axes: Any, replays: Sequence[Replay]) -> None:
    """Ranks of all methods above each other, in units of the mean."""
    blocks = []
    for one in replays:
        mean = np.maximum(one.rank_loads.mean(axis=1, keepdims=True), 1)
        blocks.append((one.rank_loads / mean).T)
    ranks = len(blocks[0])
    _heat(axes, np.minimum(np.concatenate(blocks), 3), "", "tokens per rank / mean, capped at 3 (layer 0)")
    axes.set_yticks([ranks * at + ranks / 2 - 0.5 for at in range(len(replays))], [one.name for one in replays])
    for at in range(1, len(replays)):
        axes.axhline(ranks * at - 0.5, color="white", linewidth=1)


def _lines(axes: Any, replays: Sequence[Replay]) -> None:
    for one in replays:
        axes.plot(1e3 * one.values["seconds"].mean(axis=1), label=one.name)
    axes.plot(1e3 * replays[0].values["ideal"].mean(axis=1), "k--", label="force-balanced ideal")
    axes.set(xlabel="step", ylabel="ms per layer", title="predicted time", yscale="log")
    axes.legend(ncols=4)


def _bars(axes: Any, replays: Sequence[Replay]) -> None:
    names = [one.name for one in replays]
    floor = np.zeros(len(replays))
    for metric, label in PARTS:
        height = np.array([1e3 * one.mean(metric) for one in replays])
        axes.bar(names, height, bottom=floor, label=label)
        floor += height
    axes.axhline(1e3 * replays[0].mean("ideal"), color="black", linestyle="--", label="force-balanced ideal")
    axes.set(ylabel="ms per layer", title="where the time goes")
    axes.tick_params(axis="x", rotation=30)
    axes.legend()


def _scaling(axes: Any, scaling: Mapping[str, Mapping[int, Replay]]) -> None:
    if not scaling:
        axes.set_axis_off()
        return
    for name, row in scaling.items():
        axes.plot(list(row), [100 * one.of_ideal for one in row.values()], marker="o", label=name)
    axes.set(xscale="log", xlabel="ranks", ylabel="% of the force-balanced ideal", title="scaling")
    axes.legend()
