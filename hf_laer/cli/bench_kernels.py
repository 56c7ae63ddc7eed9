"""``hf-laer bench kernels``: the engine's kernels on this device, each beside the device's own limit."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hf_laer.bench.kernels import Rate, measure_kernels
from hf_laer.cli.layer_shape import add_shape_arguments, shape_of
from hf_laer.cli.ranks import write_figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench kernels``."""
    add_shape_arguments(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures on the first GPU, or on the CPU where there is none, and prints a table."""
    shape = shape_of(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = measure_kernels(shape, args.routing.split(","), device, dtype, args.iterations)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = (
        f"one rank with E {shape.experts} H {shape.hidden} I {shape.intermediate} K {shape.top_k}, {shape.tokens} "
        f"tokens, {where}, {dtype}, torch {torch.__version__}"
    )
    console.print(_table(title, rates))
    if args.json:
        write_figures(args.json, {"shape": vars(shape), "rows": [rate.as_dict() for rate in rates]})
    return 0


def _table(title: str, rates: list[Rate]) -> Table:
    table = Table(title=title)
    for head in ("kernel", "routing", "ms", "rate", "of limit"):
        table.add_column(head, justify="left" if head in ("kernel", "routing") else "right")
    for rate in rates:
        table.add_row(
            rate.kernel, rate.routing, f"{rate.ms:.3f}", f"{rate.rate:.0f} {rate.unit}", f"{rate.of_limit:.0%}"
        )
    return table
