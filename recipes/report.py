"""What a run did, at its end: a table, a picture, a file of numbers, and what a static layout would have
done."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hf_laer.choice import Choice
from hf_laer.telemetry.plot import save_picture
from hf_laer.telemetry.record import LayerRecord
from hf_laer.telemetry.summary import LayerSummary, summarize
from hf_laer.telemetry.table import layer_table

logger = logging.getLogger(__name__)
LEFT = (
    "auto left every MoE layer to FSDP2, which is predicted to be as fast here as anything that hf_laer could do: it "
    "took no part in this run, and saw no loads. Name a --strategy to see them."
)
UNMOVED = (
    "The fullest rank had {owners:.2f} times the mean load, and nothing was moved: every token was computed by the "
    "static owner of its expert, as under ep, or because moving was predicted not to pay. The best static layout of "
    "each layer, known only afterwards, would have had {static:.2f}. --strategy llep --imbalance_threshold 1 "
    "--min_tokens_per_gemm 1 moves tokens whether it pays or not."
)


def report(
    records: Sequence[LayerRecord],
    folder: str | Path,
    console: Console,
    *,
    strategy: str,
    choices: Mapping[str, Choice] | None = None,
) -> None:
    """Writes ``expert_load.json`` and ``expert_load.png`` into ``folder``, and a table to ``console``.

    Args:
        records: All that the callback kept.
        folder: Made if missing.
        console: Where the table goes.
        strategy: Named in the title.
        choices: How each layer runs, and why, as the callback says it.
    """
    summaries = summarize(records)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "expert_load.json", summaries)
    why = {name: (choice.strategy, choice.reason) for name, choice in (choices or {}).items()}
    console.print(layer_table(summaries, title=f"Expert load, {strategy}", choices=why))
    if choices and all(choice.config is None for choice in choices.values()):
        console.print(LEFT, highlight=False, soft_wrap=True)
    if not summaries:
        return
    console.print(verdict(summaries), highlight=False, soft_wrap=True)
    try:
        console.print(f"picture: {save_picture(records, folder / 'expert_load.png')}", highlight=False)
    except ImportError:
        logger.warning("No picture: matplotlib is not installed (pip install 'hf_laer[plots]')")


def verdict(summaries: Sequence[LayerSummary]) -> str:
    """What planning gained over the owners, and how much of that no static layout could have."""

    def mean(name: str) -> float:
        return sum(getattr(summary, name) for summary in summaries) / len(summaries)

    owners, static, planned = mean("before_mean"), mean("static_mean"), mean("after_mean")
    text = (
        f"The fullest rank had {owners:.2f} times the mean load with static owners, {planned:.2f} as "
        f"planned; {static:.2f} with the best static layout of each layer, which is known only afterwards."
    )
    if owners < 1.005:
        return f"{text} There was nothing to balance."
    if not any(summary.spilled or summary.moved for summary in summaries) and planned > owners - 0.005:
        return UNMOVED.format(owners=owners, static=static)
    if planned < static:
        share = (static - planned) / (owners - planned)
        return f"{text} No static layout would have shown {share:.0%} of the gain."
    return f"{text} Here a better static layout would have done as well."


def check_moves(records: Sequence[LayerRecord], strategy: str) -> None:
    """Refuses a demonstration in which nothing moved.

    Raises:
        RuntimeError: No token was spilled and no replica moved.
    """
    spilled, moved = (sum(getattr(record, name) for record in records) for name in ("spilled", "moved"))
    if not spilled and not moved:
        raise RuntimeError(
            f"require_moves: strategy {strategy} spilled no token and moved no replica in "
            f"{len(records)} records; use llep with min_tokens_per_gemm and imbalance_threshold of 1, or "
            "fsep, on several ranks"
        )


def _write(path: Path, summaries: Sequence[LayerSummary]) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps([summary.to_dict() for summary in summaries], indent=1), encoding="utf-8")
    aside.replace(path)
