"""``hf-laer bench sft``: whole training steps, us and rivals with the same routing. Start it with torchrun."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hf_laer.bench.models import CONTENDERS, MODELS, NATIVE, REST, Job
from hf_laer.bench.routing import KNOWN
from hf_laer.cli.layer_shape import add_reshard_argument
from hf_laer.cli.ranks import joined, write_figures

if TYPE_CHECKING:
    from hf_laer.integrations.bench.sft import Trained

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench sft``."""
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=8, help="decoder layers (default 8)")
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank and step (default 2)")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence (default 4096)")
    parser.add_argument("--routing", default="balanced,80:8", help=f"{KNOWN}; comma separated")
    parser.add_argument("--contenders", default=f"llep,fsep,fsdp2,{NATIVE}", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default 8)")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing, for all")
    parser.add_argument("--attention", help="Transformers' attention implementation, for all")
    parser.add_argument("--profile", help="of hf-laer tune; auto and spilling go by it")
    parser.add_argument("--slots-per-rank", type=int, help="of strategies that re-lay out")
    add_reshard_argument(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Trains every contender, prints a table on the first rank; a contender that cannot run is left out."""
    job, contenders = _job(args), args.contenders.split(",")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"--contenders {', '.join(unknown)} unknown; known: {', '.join(CONTENDERS)}")
    with joined() as device:
        rows: list[Trained] = []
        try:
            for scenario in args.routing.split(","):
                for contender in contenders:
                    found = _trained(job, contender, scenario, device)
                    rows += [] if found is None else [found]
        finally:
            # Also when one contender fails: the others took minutes.
            if dist.get_rank() == 0 and rows:
                console.print(_table(job, rows, device))
                if args.json:
                    write_figures(args.json, {"job": vars(job), "rows": [row.as_dict() for row in rows]})
    return 0


def _trained(job: Job, contender: str, scenario: str, device: torch.device) -> Trained | None:
    # Transformers takes seconds to import, and the other commands need none of it.
    from hf_laer.integrations.bench.sft import train

    try:
        return train(job, contender, scenario, device)
    except ValueError as error:
        if contender != NATIVE:
            raise
        logger.warning("left out: %s", error)
        return None


def _job(args: argparse.Namespace) -> Job:
    for name in ("num_layers", "rows", "length", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    given = {"slots_per_rank": args.slots_per_rank, "profile": args.profile}
    laer = {name: value for name, value in given.items() if value is not None}
    sizes = args.num_layers, args.rows, args.length, args.steps
    return Job(args.model, *sizes, args.checkpointing, args.attention, laer, args.reshard_after_forward)


def _table(job: Job, rows: list[Trained], device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = (
        f"{job.model}, {job.layers} layers, {job.rows} x {job.length} tokens per rank, "
        f"{'checkpointed, ' if job.checkpointing else ''}{dist.get_world_size()} x {where}, torch {torch.__version__}"
    )
    caption = f"experts: step less {REST}'s; of ceiling: the same contender's balanced step over this one"
    table = Table(title=title, caption=caption)
    heads = "step ms", "experts ms", "tokens/s per rank", "of ceiling", "peak GiB", "loss"
    for head in ("routing", "contender", *heads):
        table.add_column(head, justify="left" if head in ("routing", "contender") else "right")
    balanced = {row.contender: row.step_ms for row in rows if row.routing == "balanced"}
    rest = {row.routing: row.step_ms for row in rows if row.contender == REST}
    for row in rows:
        ceiling = balanced.get(row.contender)
        table.add_row(
            row.routing,
            f"{row.contender}: {row.chosen}" if row.chosen else row.contender,
            f"{row.step_ms:.1f}",
            f"{row.step_ms - rest[row.routing]:.1f}" if row.routing in rest and row.contender != REST else "",
            f"{row.tokens_per_second:.0f}",
            f"{ceiling / row.step_ms:.0%}" if ceiling else "",
            f"{row.peak_gb:.1f}",
            f"{row.loss:.3f}",
        )
    return table
