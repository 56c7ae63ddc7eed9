"""``hf-laer simulate``: what each method would do with a trace, on a cluster of any size."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hf_laer.choice import attention_seconds
from hf_laer.plan import PROFILES, CostModel, Topology, topology
from hf_laer.profile import read_machine
from hf_laer.sim import METHODS, PRESET_SLOTS, PRESETS, Replay, Setting, Trace, load_trace, replay

HELP = "replay a routing trace through planners and predict step time, balance and memory"
DEFAULT_PLANNERS = "ep,fsdp_ep,llep,laer,fsep,fsep+llep"
SUFFIXES = (".html", ".png")
NODES, PER_NODE = 4, 8
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer simulate``."""
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--trace", type=Path, help="a trace (.npz), or token counts (.csv)")
    loads.add_argument("--drift", choices=sorted(PRESETS), help="made-up drifting loads (default 16e-top4)")
    parser.add_argument("--steps", type=int, default=60, help="steps of made-up loads (default 60)")
    parser.add_argument("--layers", type=int, help="layers to replay (default: all; made-up loads: 2)")
    parser.add_argument("--planner", default=DEFAULT_PLANNERS, help=f"of {','.join(METHODS)},lower_bound")
    parser.add_argument("--nodes", type=int, help="(default: as many as the trace has, else 4)")
    parser.add_argument("--gpus-per-node", type=int, help="(default: as the trace has it, else 8)")
    parser.add_argument("--experts-per-rank", type=int, help="slots per rank (default: a quarter spare)")
    parser.add_argument("--profile", default="h200", help=f"{', '.join(PROFILES)}, or a JSON file")
    parser.add_argument("--hidden", type=int, help="H (default: the trace's, or 4096)")
    parser.add_argument("--intermediate", type=int, help="I (default: the trace's, or 14336 / experts * 8)")
    parser.add_argument("--top-k", type=int, help="K (default: the trace's, or the preset's)")
    parser.add_argument("--recompute", choices=("none", "experts", "layer"), default="none")
    parser.add_argument("--forward-only", action="store_true", help="no backward")
    parser.add_argument("--other-ms", type=float, help="forward of the rest of a layer (default: attention's)")
    parser.add_argument("--max-rows", type=int, help="rows that a rank computes at a time")
    parser.add_argument("--alpha", type=float, default=1.0, help="LLEP's capacity factor")
    parser.add_argument("--min-tokens", type=int, help="LLEP's m (default: what a transfer is worth)")
    parser.add_argument("--threshold", type=float, default=1.3, help="LLEP's lambda")
    parser.add_argument("--interval", type=int, default=20, help="steps between moves of eplb, lplb, smartmoe")
    parser.add_argument("--history", type=int, default=8, help="steps that fsep and fsep+llep forecast from")
    parser.add_argument("--group-size", type=int, help="tokens stay in groups of so many ranks")
    parser.add_argument("--warmup", type=int, default=5, help="steps not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--regret", action="store_true", help="also say what staleness costs (twice the work)")
    parser.add_argument("--scaling", action="store_true", help="also from 8 to 1024 ranks, one layer")
    parser.add_argument("--out", type=Path, help="write a report: .html or .png")
    parser.add_argument("--json", type=Path, help="write the table's numbers")


def run(args: argparse.Namespace, console: Console) -> int:
    """Replays, prints the table, writes what was asked for."""
    if args.out and args.out.suffix not in SUFFIXES:
        raise ValueError(f"--out {args.out}: a report is {' or '.join(SUFFIXES)}")
    trace, what = _trace(args)
    _as_recorded(args, trace)
    names = [name.strip() for name in args.planner.split(",") if name.strip()]
    setting = _setting(args, trace, args.nodes)
    layers = range(min(args.layers or trace.layers, trace.layers))
    done = [
        replay(
            trace,
            name,
            setting,
            warmup=args.warmup,
            layers=layers,
            threads=args.threads,
            with_regret=args.regret,
        )
        for name in names
    ]
    console.print(f"{what}: {trace.steps} steps, {len(layers)} layers, {trace.experts} experts")
    console.print(_describe(setting))
    console.print(_table(done, args.regret))
    scaling = _scaling(args, trace, names) if args.scaling else {}
    if scaling:
        console.print(_scaling_table(scaling))
    if args.json:
        args.json.write_text(json.dumps({name: _numbers(one) for name, one in zip(names, done, strict=True)}))
    if args.out:
        from hf_laer.sim.report import write_report

        write_report(args.out, done, trace.layer(0, setting.ranks), scaling, f"{what}, {_describe(setting)}")
        console.print(f"wrote {args.out}")
    return 0


def _trace(args: argparse.Namespace) -> tuple[Trace, str]:
    if args.trace:
        return load_trace(args.trace), str(args.trace)
    name = args.drift or "16e-top4"
    ranks = (args.nodes or NODES) * (args.gpus_per_node or PER_NODE)
    drift = dataclasses.replace(PRESETS[name], ranks=max(1, min(32, ranks)))
    loads = [drift.loads(args.steps, layer) for layer in range(args.layers or 2)]
    meta = {"top_k": drift.top_k, "slots": PRESET_SLOTS[name]}
    return Trace(np.stack(loads, axis=1), meta), f"drifting loads {name}"


def _as_recorded(args: argparse.Namespace, trace: Trace) -> None:
    """The cluster that was not given: the one that the trace comes from."""
    known = "ranks_per_node" in trace.meta
    if args.gpus_per_node is None:
        args.gpus_per_node = int(trace.meta["ranks_per_node"]) if known else PER_NODE
    if args.nodes is None:
        args.nodes = max(1, trace.ranks // max(1, args.gpus_per_node)) if known else NODES


def _setting(args: argparse.Namespace, trace: Trace, nodes: int) -> Setting:
    machine = _machine(args.profile, nodes, args.gpus_per_node)
    top_k = args.top_k or trace.meta.get("top_k")
    if not top_k:
        raise ValueError("the trace does not say top_k: give --top-k")
    hidden = args.hidden or int(trace.meta.get("hidden", 4096))
    intermediate = args.intermediate or int(trace.meta.get("intermediate", max(1, 14336 * 8 // trace.experts)))
    tokens = float(trace.loads.sum(axis=(2, 3)).mean()) / trace.ranks / top_k
    other = args.other_ms / 1e3 if args.other_ms is not None else attention_seconds(machine, hidden, tokens)
    cost = CostModel(
        machine,
        hidden,
        intermediate,
        int(top_k),
        training=not args.forward_only,
        recompute=args.recompute,
        other_seconds=other,
        max_rows_per_rank=args.max_rows,
    )
    return Setting(
        cost,
        trace.experts,
        _slots(args.experts_per_rank, trace, args.group_size or machine.num_ranks),
        capacity_factor=args.alpha,
        min_tokens=args.min_tokens,
        threshold=args.threshold,
        interval=args.interval,
        history=args.history,
        group=args.group_size,
    )


def _slots(asked: int | None, trace: Trace, ranks: int) -> int:
    """Slots per rank: as asked, else as the trace says, else a quarter more than an even share."""
    if asked is not None:
        return min(asked, trace.experts)
    share = -(-trace.experts // ranks)
    usual = max(share + 1, -(-5 * trace.experts // (4 * ranks)))
    return min(max(int(trace.meta.get("slots", usual)), share), trace.experts)


def _machine(profile: str, nodes: int, per_node: int) -> Topology:
    if nodes < 1 or per_node < 1:
        raise ValueError(f"--nodes {nodes} and --gpus-per-node {per_node} must be at least 1")
    if profile in PROFILES:
        return topology(profile, nodes, per_node)
    if not Path(profile).exists():
        raise ValueError(f"no profile {profile!r}; there are {', '.join(PROFILES)}, or give a JSON file")
    return read_machine(profile, nodes, per_node)


def _describe(setting: Setting) -> str:
    cost, machine = setting.cost, setting.cost.topology
    return (
        f"{machine.nodes} nodes x {machine.width} ranks, {setting.slots} slots per rank, H={cost.hidden} "
        f"I={cost.intermediate} K={cost.top_k}, m={setting.least}"
    )


def _numbers(one: Replay) -> dict[str, float]:
    return {
        "imbalance_mean": one.mean("imbalance"),
        "imbalance_p95": one.percentile("imbalance", 95),
        **{f"{name}_ms": 1e3 * one.mean(name) for name in TIMES},
        "of_ideal": one.of_ideal,
        "peak_gb": one.percentile("peak_bytes", 100) / 1e9,
        "weight_slots": one.mean("weight_slots"),
        "late_slots": one.mean("late"),
        "regret_ms": 1e3 * one.mean("regret"),
    }


TIMES = ("seconds", "compute", "exchange", "weights_exposed", "weights_hidden")


def _table(done: list[Replay], regret: bool) -> Table:
    table = Table(title="per layer and micro-batch; milliseconds are predicted")
    table.add_column("planner")
    heads = (
        "max/mean",
        "p95",
        "ms",
        "compute",
        "tokens",
        "weights",
        "(hidden)",
        "% of ideal",
        "peak GB",
        "slots",
        "late",
    )
    for head in (*heads, *(("regret ms",) if regret else ())):
        table.add_column(head, justify="right")
    for one in done:
        n = _numbers(one)
        cells = [f"{n['imbalance_mean']:.2f}", f"{n['imbalance_p95']:.2f}"]
        cells += [f"{n[f'{name}_ms']:.2f}" for name in TIMES]
        cells += [f"{100 * n['of_ideal']:.0f}", f"{n['peak_gb']:.2f}", f"{n['weight_slots']:.0f}"]
        cells += [f"{n['late_slots']:.1f}"]
        table.add_row(one.name, *cells, *((f"{n['regret_ms']:.2f}",) if regret else ()))
    return table


def _scaling(args: argparse.Namespace, trace: Trace, names: list[str]) -> dict[str, dict[int, Replay]]:
    """One layer, few steps, from 8 ranks up; sizes whose slots cannot hold all experts are left out."""
    few = Trace(trace.loads[: args.warmup + 8, :1], trace.meta)
    out: dict[str, dict[int, Replay]] = {name: {} for name in names}
    for ranks in SCALES:
        if ranks % args.gpus_per_node:
            continue
        try:
            setting = _setting(args, few, ranks // args.gpus_per_node)
        except ValueError:
            continue
        for name in names:
            out[name][ranks] = replay(few, name, setting, warmup=args.warmup, threads=1)
    return out


def _scaling_table(scaling: dict[str, dict[int, Replay]]) -> Table:
    table = Table(title="% of the force-balanced ideal by number of ranks (max/mean in brackets)")
    table.add_column("planner")
    sizes = sorted({ranks for row in scaling.values() for ranks in row})
    for ranks in sizes:
        table.add_column(str(ranks), justify="right")
    for name, row in scaling.items():
        cells = [f"{100 * row[n].of_ideal:.0f} ({row[n].mean('imbalance'):.2f})" for n in sizes]
        table.add_row(name, *cells)
    return table
