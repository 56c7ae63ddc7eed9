"""``hf-laer bench``: planners and kernels beside their limits; a MoE layer and whole training beside their rivals."""

from __future__ import annotations

import argparse
import importlib.util

from rich.console import Console
from rich.table import Table

from hf_laer.cli import bench_kernels, bench_layer, bench_sft, bench_stack, bench_suite
from hf_laer.sim.bench import TARGETS, compile_seconds, drift_table, method_table, timings

HELP = (
    "measure planners (balance on drifting loads, time per plan), kernels on one device, one MoE layer, several with "
    "attention, or whole training steps on all ranks, or the papers' own comparisons"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench``."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    kernels = subjects.add_parser("kernels", help="the engine's kernels, on one device")
    bench_kernels.add_arguments(kernels)
    layer = subjects.add_parser("layer", help="one MoE layer, us and rivals, on all ranks of torchrun")
    bench_layer.add_arguments(layer)
    stack = subjects.add_parser("stack", help="MoE layers with attention between them, on all ranks of torchrun")
    bench_stack.add_arguments(stack)
    sft = subjects.add_parser("sft", help="whole training steps, us and rivals, on all ranks of torchrun")
    bench_sft.add_arguments(sft)
    suite = subjects.add_parser("suite", help="the papers' own comparisons on this host's GPUs, resumable")
    bench_suite.add_arguments(suite)
    plan = subjects.add_parser("plan", help="planners, on this machine's CPU")
    plan.add_argument("--steps", type=int, default=30, help="steps of drifting loads (default 30)")
    plan.add_argument("--layers", type=int, default=2, help="independent draws (default 2)")
    plan.add_argument("--repeats", type=int, default=50, help="timed calls per figure (default 50)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures one subject and prints its tables."""
    benches = {
        "kernels": bench_kernels,
        "layer": bench_layer,
        "stack": bench_stack,
        "sft": bench_sft,
        "suite": bench_suite,
    }
    return _run_plan(args, console) if args.subject == "plan" else benches[args.subject].run(args, console)


def _run_plan(args: argparse.Namespace, console: Console) -> int:
    if args.steps < 6 or args.layers < 1 or args.repeats < 1:
        raise ValueError(f"--steps {args.steps} must be at least 6, --layers and --repeats at least 1")
    console.print(f"planners compiled or loaded from the cache in {compile_seconds():.1f} s (not counted below)")
    console.print(_time_table(timings(args.repeats)))
    oracle = importlib.util.find_spec("scipy") is not None
    rows = drift_table(args.steps, args.layers, oracle=oracle)
    console.print(_balance_table("max/mean over 32 ranks (4 x 8) on drifting loads, mean over steps", rows))
    rows = [_with_percentiles(row) for row in method_table(args.steps, args.layers)]
    title = "max/mean over ranks, mean / p95 over steps; weights fetched late by fsep+llep, of llep's"
    for kind, leaves_out in (("", ("whole", "replicas")), (", experts whole with owners", ("laer", "fsep", "lower"))):
        kept = [{head: row[head] for head in row if not head.startswith(leaves_out)} for row in rows]
        console.print(_balance_table(title + kind, kept))
    if not oracle:
        console.print("without scipy: no comparison with HiGHS")
    return 0


def _time_table(seconds: dict[str, tuple[float, float]]) -> Table:
    table = Table(title="microseconds of CPU per plan, one core")
    for head in ("plan", "least", "median", "target", "least of target", "median of target"):
        table.add_column(head, justify="left" if head == "plan" else "right")
    for name, (median, least) in seconds.items():
        target = TARGETS[name]
        figures = (least * 1e6, median * 1e6, target * 1e6)
        ratios = (least / target, median / target)
        table.add_row(name, *(f"{value:.0f}" for value in figures), *(f"{value:.2f}" for value in ratios))
    return table


def _with_percentiles(row: dict[str, float | str]) -> dict[str, float | str]:
    """Mean and 95th percentile in one cell."""
    out = {}
    for head, value in row.items():
        if f"{head} p95" in row:
            value = f"{value:.2f} / {row[f'{head} p95']:.2f}"
        if not head.endswith(" p95"):
            out[head] = value
    return out


def _balance_table(title: str, rows: list[dict[str, float | str]]) -> Table:
    table = Table(title=title)
    for head in rows[0]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table
