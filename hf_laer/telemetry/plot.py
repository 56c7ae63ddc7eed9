"""A run's records as a picture. Matplotlib is imported only here, and draws to files without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_laer.telemetry.record import LayerRecord
from hf_laer.telemetry.summary import LayerSummary, by_layer, summarize
from hf_laer.telemetry.table import short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Many experts make an unreadable stack: the rest are drawn as one.
SHOWN = 12
BEFORE, STATIC, AFTER = "#d95f02", "#999999", "#1b9e77"


def save_picture(records: Sequence[LayerRecord], path: str | Path, *, layer: str | None = None) -> Path:
    """Draws :func:`load_figure` into a file (PNG, SVG or PDF by its suffix), aside first, then renamed."""
    return save_figure(load_figure(records, layer=layer), path)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure, aside first, then renamed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.tmp{path.suffix}")
    figure.savefig(aside, dpi=130)
    aside.replace(path)
    return path


def load_figure(records: Sequence[LayerRecord], *, layer: str | None = None) -> Figure:
    """Expert load and ranks' load over steps of one layer, and every layer's imbalance.

    Args:
        records: Of one run; at least one.
        layer: The layer drawn over steps; ``None`` takes the one whose owners were most unequal.

    Raises:
        ValueError: There are no records, or none of ``layer``.
        ImportError: Matplotlib is missing (``pip install 'hf_laer[plots]'``).
    """
    from matplotlib.figure import Figure

    layers = by_layer(records)
    if not layers:
        raise ValueError("There are no records to draw: train at least one step with a patched model")
    summaries = summarize(records)
    if layer is None:
        layer = max(summaries, key=lambda summary: summary.before_mean).layer
    if layer not in layers:
        raise ValueError(f"layer={layer!r} has no records; known: {', '.join(layers)}")
    figure = Figure(figsize=(11, 9), layout="constrained")
    experts, ranks, all_layers = figure.subplots(3, 1)
    _draw_experts(experts, layers[layer])
    _draw_ranks(ranks, layers[layer])
    _draw_layers(all_layers, summaries)
    return figure


def _draw_experts(axes: Any, records: list[LayerRecord]) -> None:
    loads = np.stack([record.expert_loads for record in records]).astype(float)
    order = np.argsort(-loads.sum(0), kind="stable")
    shown, rest = order[:SHOWN], order[SHOWN:]
    bands = [loads[:, expert] for expert in shown]
    names = [f"expert {expert}" for expert in shown]
    if len(rest):
        bands.append(loads[:, rest].sum(-1))
        names.append(f"{len(rest)} others")
    total = np.maximum(loads.sum(-1), 1)
    axes.stackplot(np.arange(len(records)), [band / total for band in bands], labels=names)
    axes.set(title=f"{short_name(records[0].layer)}: share of each expert", xlabel="micro-batch", ylabel="share")
    axes.set(xlim=(0, max(1, len(records) - 1)), ylim=(0, 1))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def _draw_ranks(axes: Any, records: list[LayerRecord]) -> None:
    """The band between the least and the most loaded rank, before and after planning, over the mean."""
    steps = np.arange(len(records))
    for name, colour in (("loads_before", BEFORE), ("loads_after", AFTER)):
        loads = np.stack([getattr(record, name) for record in records]).astype(float)
        relative = loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)
        label = "owners" if name == "loads_before" else "planned"
        axes.fill_between(steps, relative.min(-1), relative.max(-1), color=colour, alpha=0.25)
        axes.plot(steps, relative.max(-1), color=colour, label=f"{label}: fullest rank")
        axes.plot(steps, relative.min(-1), color=colour, linestyle=":", label=f"{label}: emptiest rank")
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set(title=f"{short_name(records[0].layer)}: tokens of ranks over their mean", xlabel="micro-batch")
    axes.set(xlim=(0, max(1, len(records) - 1)), ylabel="load / mean")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def _draw_layers(axes: Any, summaries: Sequence[LayerSummary]) -> None:
    places = np.arange(len(summaries))
    bars = (("before_mean", "owners", BEFORE), ("static_mean", "best static", STATIC))
    for index, (name, label, colour) in enumerate(bars):
        heights = [getattr(summary, name) - 1.0 for summary in summaries]
        axes.bar(places + 0.4 * (index - 0.5), heights, 0.4, bottom=1.0, label=label, color=colour)
    # Points, as a bar of height 1.00 would not be seen.
    axes.plot(places, [summary.after_mean for summary in summaries], "D", color=AFTER, label="planned")
    axes.set_xticks(places, [short_name(summary.layer).split(".")[-1] for summary in summaries], fontsize="small")
    axes.set(title="every layer: mean of max/mean over ranks", xlabel="layer", ylabel="max / mean")
    axes.set_ylim(bottom=0.98)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
