"""``hf-laer bench stack``: MoE layers with attention between them, us and FSDP2. Start it with torchrun."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hf_laer.bench.layer import LayerShape
from hf_laer.bench.stack import ATTENTION, CONTENDERS, GEMM, StackBench, StackMeasured
from hf_laer.cli.layer_shape import add_reshard_argument, add_shape_arguments, shape_of
from hf_laer.cli.ranks import joined, write_figures
from hf_laer.profile import read_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench stack``."""
    add_shape_arguments(parser)
    parser.add_argument("--layers", type=int, default=4, help="in a row (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence (default 4096)")
    parser.add_argument("--contenders", default="fsep,llep,fsep+llep,fsdp2", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--slots-per-rank", type=int, help="of strategies that re-lay out")
    add_reshard_argument(parser)
    parser.add_argument("--profile", type=Path, help="of hf-laer tune; spilling goes by it")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures, prints a table on the first rank."""
    contenders = args.contenders.split(",")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"--contenders {', '.join(unknown)} unknown; known: {', '.join(CONTENDERS)}")
    if args.layers < 1 or args.length < 1:
        raise ValueError(f"--layers {args.layers} and --length {args.length} must be at least 1")
    shape = replace(shape_of(args), layers=args.layers)
    settings = {} if args.slots_per_rank is None else {"slots_per_rank": args.slots_per_rank}
    settings["reshard_after_forward"] = args.reshard_after_forward
    profile = read_profile(args.profile) if args.profile else None
    with joined() as device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        bench = StackBench(shape, args.length, device, dtype, profile, settings)
        rows = bench.measure(contenders, args.routing.split(","), args.iterations)
        if dist.get_rank() == 0:
            console.print(_table(shape, rows, device))
            if args.json:
                write_figures(args.json, {"shape": vars(shape), "rows": [row.as_dict() for row in rows]})
    return 0


def _table(shape: LayerShape, rows: list[StackMeasured], device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = (
        f"{shape.layers} layers with attention, E {shape.experts} H {shape.hidden} I {shape.intermediate} "
        f"K {shape.top_k}, {shape.tokens} tokens per rank, {dist.get_world_size()} x {where}, torch {torch.__version__}"
    )
    table = Table(title=title, caption="layer: one layer's experts, by the stack without them; ceiling: balanced")
    heads = "step ms", "layer ms", "x gemm", "of ceiling", "peak GiB", "unshard ms", "GB/s", "hidden"
    for head in ("routing", "contender", *heads):
        table.add_column(head, justify="left" if head in ("routing", "contender") else "right")
    gemm = next(row.layer_ms for row in rows if row.contender == GEMM)
    balanced = {row.contender: row.layer_ms for row in rows if row.routing == "balanced"}
    for row in rows:
        ceiling, ours = balanced.get(row.contender), row.contender not in (ATTENTION, GEMM)
        table.add_row(
            row.routing,
            row.contender,
            f"{row.step_ms:.2f}",
            f"{row.layer_ms:.2f}" if row.contender != ATTENTION else "",
            f"{row.layer_ms / gemm:.2f}" if ours else "",
            f"{ceiling / row.layer_ms:.0%}" if ceiling and ours else "",
            f"{row.peak_gb:.1f}",
            f"{row.unshard_ms:.2f}" if row.unshard_ms else "",
            f"{row.unshard_gb_s:.0f}" if row.unshard_ms else "",
            f"{row.hidden:.0%}" if row.unshard_ms else "",
        )
    return table
