"""``hf-laer bench layer``: one MoE layer, every contender with the same routing in one run. Start it with torchrun."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hf_laer.bench.layer import Bench, LayerShape, Measured, measure
from hf_laer.bench.models import OURS
from hf_laer.bench.rivals import RIVALS, BenchWeights, Rivals
from hf_laer.bench.routing import changes
from hf_laer.cli.layer_shape import add_shape_arguments, shape_of
from hf_laer.cli.ranks import joined, write_figures
from hf_laer.config import AUTO
from hf_laer.profile import read_profile


def _native(sizes: BenchWeights) -> Any:
    """Transformers' own all-to-all expert parallelism; what it needs is imported only for it."""
    from hf_laer.integrations.bench.native_ep import NativeLayer

    return NativeLayer(sizes.make(sizes.share()), sizes.top_k)


ALL_RIVALS: Rivals = {"hf_a2a": _native, **RIVALS}
CONTENDERS = (*OURS, AUTO, *ALL_RIVALS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench layer``."""
    add_shape_arguments(parser)
    parser.add_argument("--contenders", default="ep,llep,fsep,fsdp_gather,gemm", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument(
        "--layers", type=int, default=1, help="so many in a row, so that experts can travel ahead; no rivals then"
    )
    parser.add_argument(
        "--blocks", type=int, default=3, help="rounds in which contenders take turns, where routing does not change"
    )
    parser.add_argument("--profile", type=Path, help="of hf-laer tune; auto and spilling go by it")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures, prints a table on the first rank."""
    shape = replace(shape_of(args), layers=args.layers)
    contenders, scenarios = args.contenders.split(","), args.routing.split(",")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"--contenders {', '.join(unknown)} unknown; known: {', '.join(CONTENDERS)}")
    rivals = [name for name in contenders if name in ALL_RIVALS]
    if args.layers < 1 or (args.layers > 1 and rivals):
        raise ValueError(f"--layers {args.layers}: at least 1, and rivals ({', '.join(rivals)}) run one layer alone")
    if args.blocks < 1:
        raise ValueError(f"--blocks {args.blocks} must be at least 1")
    profile = read_profile(args.profile) if args.profile else None
    with joined() as device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows: list[Measured] = []
        try:
            bench = Bench(shape, device, dtype, ALL_RIVALS, profile, {"history": 1})
            for scenario in scenarios:
                if changes(scenario):
                    # A history of its own for each, which follows its own steps.
                    kinds = device, dtype, args.iterations, ALL_RIVALS, profile
                    rows += [measure(shape, contender, scenario, *kinds) for contender in contenders]
                else:
                    rows += bench.measure(contenders, scenario, args.iterations, args.blocks)
        finally:
            if dist.get_rank() == 0 and rows:
                console.print(_table(shape, rows, device))
                if args.json:
                    write_figures(args.json, {"shape": vars(shape), "rows": [row.as_dict() for row in rows]})
    return 0


def _table(shape: LayerShape, rows: list[Measured], device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = (
        f"{shape.layers} x E {shape.experts} H {shape.hidden} I {shape.intermediate} K {shape.top_k}, "
        f"{shape.tokens} tokens per rank, "
        f"{dist.get_world_size()} x {where}, torch {torch.__version__}"
    )
    table = Table(title=title, caption="ceiling: the same contender's balanced step; gemm: the products alone")
    for head in ("routing", "contender", "forward ms", "step ms", "of ceiling", "x gemm", "peak GiB", "imbalance"):
        table.add_column(head, justify="left" if head in ("routing", "contender") else "right")
    balanced = {row.contender: row.step_ms for row in rows if row.routing == "balanced"}
    for row in rows:
        ceiling, gemm = balanced.get(row.contender), balanced.get("gemm")
        table.add_row(
            row.routing,
            row.contender,
            f"{row.forward_ms:.2f}",
            f"{row.step_ms:.2f}",
            f"{ceiling / row.step_ms:.0%}" if ceiling else "",
            f"{row.step_ms / gemm:.2f}" if gemm else "",
            f"{row.peak_gb:.1f}",
            f"{row.imbalance_before:.2f} > {row.imbalance_after:.3f}" if row.imbalance_after else "",
        )
    return table
