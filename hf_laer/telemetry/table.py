"""A run's summary as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from hf_laer.telemetry.summary import LayerSummary

CAPTION = (
    "max/mean over ranks, mean (worst) over micro-batches; owners: every expert with its static owner; "
    "best static: the best static layout for these very loads, known only afterwards; "
    "why: given, or milliseconds predicted of the strategy and of the one that it was weighed against"
)


def layer_table(
    summaries: Sequence[LayerSummary],
    *,
    title: str = "Expert load",
    choices: Mapping[str, tuple[str, str]] | None = None,
) -> Table:
    """One row per layer and one for the mean of all.

    Args:
        summaries: As :func:`hf_laer.telemetry.summary.summarize` gives them.
        title: Above the table.
        choices: By layer, how it runs, and why; layers that are left to FSDP2 have a row each, without numbers.
    """
    choices = choices or {}
    table = Table(title=title, caption=CAPTION)
    table.add_column("layer", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for name in ("experts", "owners", "best static", "planned", "spilled", "moved", "plan ms"):
        table.add_column(name, justify="right")
    if choices:
        table.add_column("why")
    seen = {summary.layer: summary for summary in summaries}
    for layer in dict.fromkeys((*choices, *seen)):
        if layer not in seen:
            strategy, reason = choices[layer]
            table.add_row(short_name(layer), strategy, *[""] * 7, reason)
            continue
        summary, why = seen[layer], choices[layer][1:] if layer in choices else ()
        table.add_row(
            short_name(summary.layer),
            summary.strategy,
            f"{summary.expert_imbalance:.2f}",
            f"{summary.before_mean:.2f} ({summary.before_max:.2f})",
            f"{summary.static_mean:.2f}",
            f"{summary.after_mean:.2f} ({summary.after_max:.2f})",
            f"{summary.spilled:.1%}",
            f"{summary.moved}",
            f"{summary.plan_ms:.2f}",
            *why,
        )
    if summaries:
        table.add_section()
        table.add_row(*_mean_row(summaries), style="bold")
    return table


def short_name(layer: str) -> str:
    """``model.layers.7.mlp.experts`` as ``layers.7``; a name without a number as it is."""
    parts = layer.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[max(0, numbers[0] - 1) : numbers[0] + 1]) if numbers else layer


def _mean_row(summaries: Sequence[LayerSummary]) -> list[str]:
    def mean(name: str) -> float:
        return sum(getattr(summary, name) for summary in summaries) / len(summaries)

    tokens = sum(summary.tokens for summary in summaries)
    spilled = sum(summary.spilled * summary.tokens for summary in summaries) / max(tokens, 1)
    return [
        "all",
        "",
        f"{mean('expert_imbalance'):.2f}",
        f"{mean('before_mean'):.2f} ({max(summary.before_max for summary in summaries):.2f})",
        f"{mean('static_mean'):.2f}",
        f"{mean('after_mean'):.2f} ({max(summary.after_max for summary in summaries):.2f})",
        f"{spilled:.1%}",
        f"{sum(summary.moved for summary in summaries)}",
        f"{mean('plan_ms'):.2f}",
    ]
