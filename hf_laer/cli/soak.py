"""``hf-laer soak``: a long training run on this machine's CPU, held to an unpatched shadow."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from hf_laer.config import AUTO, STRATEGIES
from hf_laer.soak.run import Line, soak
from hf_laer.soak.task import UNPATCHED, Settings

HELP = "train a tiny model for long under drifting routing, with resumes, and hold each figure to an unpatched model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer soak``."""
    parser.add_argument(
        "--strategy",
        choices=(*STRATEGIES, AUTO, UNPATCHED),
        default=Settings.strategy,
        help="none: the unpatched model",
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default 2000)")
    parser.add_argument(
        "--ranks", type=int, default=Settings.ranks, help="processes; half of them in every second part"
    )
    parser.add_argument("--part", type=int, default=Settings.part, help="steps between resumes (default 500)")
    parser.add_argument("--check", type=int, default=Settings.check, help="steps between comparisons (default 50)")
    parser.add_argument("--evaluate", type=int, default=Settings.evaluate, help="between evaluations (default 100)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of weights and data (default 0)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Soaks, prints what came out; 1 if anything is not as it should be."""
    settings = Settings(args.strategy, args.steps, args.ranks, args.part, args.check, args.evaluate, args.seed)
    try:
        lines = soak(settings, lambda text: console.print(text, highlight=False))
    except RuntimeError as error:
        console.print(f"the soak failed: {error}", markup=False)
        return 1
    console.print(_table(settings, lines))
    return 1 if any(line.good is False for line in lines) else 0


def _table(settings: Settings, lines: list[Line]) -> Table:
    table = Table(title=f"{settings.steps} steps of {settings.strategy} on {settings.ranks} and {settings.fewer} ranks")
    for head in ("what", "found", "wanted", ""):
        table.add_column(head)
    for line in lines:
        verdict = {True: "good", False: "NOT GOOD", None: ""}[line.good]
        table.add_row(line.what, line.found, line.wanted, verdict)
    return table
