"""``hf-laer tune``: measures this host, writes its profile, and says how a model should run. Start it with torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hf_laer.bench.host import measure_host, warm_up
from hf_laer.bench.layer import LAYERS, LayerShape, measure
from hf_laer.bench.rivals import BenchWeights
from hf_laer.bench.routing import routing
from hf_laer.choice import (
    Alternative,
    LayerSizes,
    alternatives,
    best,
    ranks_that_hold,
    threshold,
    tuned,
)
from hf_laer.cli.ranks import joined, write_figures
from hf_laer.comm.groups import ranks_of_node
from hf_laer.config import FSDP2, STRATEGIES, LaerConfig
from hf_laer.loads import Loads, usual_loads
from hf_laer.profile import Profile, read_profile

HELP = "measure this host on all ranks of torchrun, write its profile, and recommend settings for a model"
GIB = 2.0**30
# Of the time that there is, so much may have passed before another layer is timed.
ENOUGH = 0.75
ITERATIONS = 4
KNOWN = (*STRATEGIES, FSDP2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer tune``."""
    parser.add_argument("--model", help="a Transformers model: a folder, or a name on the Hub")
    parser.add_argument("--layer", choices=LAYERS, help="or a layer by name; sizes given by hand go before it")
    for name in ("experts", "hidden", "intermediate", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--layers", type=int, help="MoE layers (default: the model's, or 1)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank and micro-batch (default 8192)")
    parser.add_argument("--nodes", type=int, help="to recommend for (default: as many as run this)")
    parser.add_argument("--ranks-per-node", type=int, help="ranks that share a node (default: torchrun's)")
    parser.add_argument(
        "--out", type=Path, default=Path("hf_laer_profile.json"), help="the profile (default %(default)s)"
    )
    parser.add_argument("--profile", type=Path, help="recommend by this profile; nothing is measured")
    parser.add_argument("--routing", default="balanced,80", help="to time: balanced, zipf, R:h, R; comma separated")
    parser.add_argument(
        "--check", default="ep,llep,fsep,fsdp,fsdp2", help="strategies to time against their prediction, or none"
    )
    parser.add_argument("--seconds", type=float, default=55.0, help="about the time for all of it (default 55)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures, writes, recommends; prints on the first rank."""
    sizes, layers = _sizes(args)
    _check_numbers(args)
    config = LaerConfig(tokens_per_rank=args.tokens)
    if args.profile:
        profile = read_profile(args.profile)
        _recommend(args, console, _in_dtype(sizes, profile), layers, profile, config, args.nodes or 1, _width(args))
        return 0
    with joined() as device:
        warm_up(device)
        begun = time.monotonic()
        width = min(_width(args), dist.get_world_size())
        profile = measure_host(device, width, _weights(sizes, device))
        sizes, first = _in_dtype(sizes, profile), dist.get_rank() == 0
        if first and dist.get_world_size() == 1:
            console.print("one process: no exchange is measured; start it with torchrun for as many as there are GPUs")
        if first:
            profile.write(args.out)
            console.print(_profile_table(profile))
            console.print(f"wrote {args.out} after {time.monotonic() - begun:.0f} s")
        checked = _checks(args, sizes, profile, device, begun)
        if first:
            if checked:
                console.print(_check_table(checked))
            nodes = args.nodes or dist.get_world_size() // width
            found = _recommend(args, console, sizes, layers, profile, config, nodes, width)
            console.print(f"{time.monotonic() - begun:.0f} s in all")
            if args.json:
                told = {"profile": profile.to_dict(), "sizes": vars(sizes), "checked": checked, "predicted": found}
                write_figures(args.json, told)
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("tokens", "nodes", "ranks_per_node", "layers", "seconds"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    unknown = [name for name in _names(args.check) if name not in KNOWN]
    if unknown:
        raise ValueError(f"--check {', '.join(unknown)} unknown; known: {', '.join(KNOWN)}, none")


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name for name in text.split(",") if name]


def _sizes(args: argparse.Namespace) -> tuple[LayerSizes, int]:
    """The layer that the model has most of, and how many MoE layers there are."""
    given = {name: getattr(args, name) for name in ("experts", "hidden", "intermediate", "top_k")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.model:
        # Transformers takes seconds to import, and the other ways need none of it.
        from hf_laer.integrations.transformers.sizes import moe_layers

        found = moe_layers(args.model)
        usual = max(set(found), key=found.count)
        return dataclasses.replace(usual, **given), args.layers or len(found)
    sizes: dict[str, Any] = {**LAYERS.get(args.layer or "", {}), **given}
    missing = [name for name in ("experts", "hidden", "intermediate", "top_k") if name not in sizes]
    if missing:
        raise ValueError(
            f"give --model, or --layer ({', '.join(LAYERS)}), or sizes; missing: "
            f"{', '.join('--' + name.replace('_', '-') for name in missing)}"
        )
    return LayerSizes(**sizes), args.layers or 1


def _in_dtype(sizes: LayerSizes, profile: Profile) -> LayerSizes:
    return dataclasses.replace(sizes, value_bytes=4 if profile.device == "cpu" else 2)


def _width(args: argparse.Namespace) -> int:
    """Ranks of a node."""
    return int(args.ranks_per_node or ranks_of_node())


def _weights(sizes: LayerSizes, device: torch.device) -> BenchWeights:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return BenchWeights(sizes.experts, sizes.hidden, sizes.intermediate, sizes.top_k, device, dtype)


def _checks(
    args: argparse.Namespace, sizes: LayerSizes, profile: Profile, device: torch.device, begun: float
) -> list[dict[str, Any]]:
    """One layer, timed as ``hf-laer bench layer`` does, beside what was predicted for it. Collective."""
    ranks = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    shape = LayerShape(sizes.experts, sizes.hidden, sizes.intermediate, sizes.top_k, args.tokens)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LaerConfig(history=1, tokens_per_rank=args.tokens)
    for scenario in _names(args.routing):
        name = f"{scenario}:{_hot(sizes, ranks)}" if scenario.isdigit() else scenario
        loads = _routed(name, shape, ranks)
        for one in alternatives(
            sizes,
            profile,
            ranks,
            ranks,
            config,
            tokens=args.tokens,
            loads=[loads],
            strategies=_names(args.check),
            alone=True,
        ):
            if not _is_time(begun, args.seconds, one.seconds * 5 * ITERATIONS, device):
                return rows
            got = measure(shape, one.strategy, name, device, dtype, ITERATIONS, profile=profile)
            rows.append({"routing": name, **_figures(one), "measured_ms": got.step_ms, "measured_gib": got.peak_gb})
    return rows


def _hot(sizes: LayerSizes, ranks: int) -> int:
    """Hot experts that one rank owns: a quarter of its own, as many as a token needs at least."""
    most = max(sizes.top_k, sizes.experts - sizes.top_k)
    return min(most, max(sizes.top_k, -(-sizes.experts // ranks) // 4))


def _routed(name: str, shape: LayerShape, ranks: int) -> Loads:
    """The loads of a scenario of the bench."""
    cpu = torch.device("cpu")
    rows = [routing(name, shape.tokens, shape.experts, shape.top_k, rank, cpu) for rank in range(ranks)]
    counts = np.stack([torch.bincount(row.reshape(-1), minlength=shape.experts).numpy() for row in rows])
    return Loads(name, counts, counts)


def _is_time(begun: float, seconds: float, needed: float, device: torch.device) -> bool:
    """Whether the first rank has time for more. Collective."""
    passed = time.monotonic() - begun
    flag = torch.tensor([float(passed < ENOUGH * seconds and passed + needed < seconds)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def _recommend(
    args: argparse.Namespace,
    console: Console,
    sizes: LayerSizes,
    layers: int,
    profile: Profile,
    config: LaerConfig,
    nodes: int,
    width: int,
) -> list[dict[str, Any]]:
    """Prints every alternative at its best settings, and the best of them."""
    ranks = nodes * width
    loads = usual_loads(sizes, ranks, args.tokens)

    def predicted(one: LaerConfig, strategy: str | None = None) -> Alternative:
        names = [strategy or one.strategy]
        return alternatives(sizes, profile, ranks, width, one, loads=loads, layers=layers, strategies=names)[0]

    share = -(-sizes.experts // ranks)
    slots = sorted({min(sizes.experts, room) for room in (share, share + 1, -(-3 * share // 2), 2 * share)})
    found = [predicted(tuned(config.with_strategy(name), predicted, slots)) for name in STRATEGIES]
    found.append(predicted(config, FSDP2))
    chosen = best(found, ranks)
    console.print(_alternatives_table(found, chosen, sizes, layers, nodes, width, args.tokens))
    if not chosen.fits:
        needed = ranks_that_hold(sizes, profile, layers)
        console.print(f"the experts do not fit {ranks} ranks: they take {needed} at least", markup=False)
    limit = threshold(sizes, profile, ranks, width, chosen.config, args.tokens)
    for line in _settings(args, chosen, limit):
        console.print(line, highlight=False, markup=False)
    return [_figures(one) for one in found]


def _settings(args: argparse.Namespace, chosen: Alternative, limit: float | None) -> list[str]:
    """What to put into a LaerConfig file."""
    config = chosen.config
    if chosen.strategy == FSDP2:
        return [
            "recommended: leave the experts to FSDP2; hf_laer is predicted to win less than 3% here, or nothing",
            "  strategy: auto  # does so under Accelerate's FSDP2",
            f"  profile: {args.profile or args.out}",
        ]
    lines = ["recommended:", f"  strategy: {config.strategy}"]
    if config.strategy in ("llep", "fsep+llep"):
        lines += [
            f"  capacity_factor: {config.capacity_factor}",
            f"  min_tokens_per_gemm: {config.min_tokens_per_gemm}",
        ]
        begins = "never pays here" if limit is None else f"begins to pay at a max/mean of about {limit:.2f}"
        lines.append(f"  imbalance_threshold: null  # batch by batch, by predicted gain; spilling {begins}")
    if config.strategy in ("fsep", "fsep+llep"):
        slots = "null  # a quarter spare" if config.slots_per_rank is None else config.slots_per_rank
        lines.append(f"  slots_per_rank: {slots}")
    if config.expert_homes is not None:
        lines.append(f"  expert_homes: {config.expert_homes}")
    return [*lines, f"  profile: {args.profile or args.out}"]


def _figures(one: Alternative) -> dict[str, Any]:
    """For JSON and tables."""
    times = {name: 1e3 * getattr(one, name) for name in ("seconds", "compute", "tokens", "weights", "hidden")}
    settings = ("slots_per_rank", "capacity_factor", "min_tokens_per_gemm")
    return {
        "strategy": one.strategy,
        "predicted_ms": times.pop("seconds"),
        **{f"{name}_ms": value for name, value in times.items()},
        "peak_gib": one.peak_bytes / GIB,
        "fits": one.fits,
        **{name: getattr(one.config, name) for name in settings},
    }


def _profile_table(profile: Profile) -> Table:
    table = Table(title=f"{profile.device}: measured", caption=f"assumed: {', '.join(profile.assumed) or 'nothing'}")
    for head in ("what", "bandwidth", "latency"):
        table.add_column(head, justify="left" if head == "what" else "right")
    rows = {
        "copy (read + written)": (profile.copy_bandwidth, None),
        "exchange in a node, per rank": (profile.intra_bandwidth, profile.intra_latency),
        "exchange between nodes, per rank": (profile.inter_per_rank, profile.inter_latency),
    }
    for name, (rate, latency) in rows.items():
        table.add_row(name, f"{rate / 1e9:.1f} GB/s", "" if latency is None else f"{latency * 1e6:.0f} us")
    for name in ("all_to_all", "all_to_all_between_nodes", "broadcast"):
        if name in profile.measured:
            table.add_row(f"{name}, by size", _curve(profile.measured[name]), "")
    rates = zip(profile.gemm_tokens, profile.gemm_efficiency, strict=True)
    reached = " ".join(f"{rows}:{part * profile.flops / 1e12:.3g}" for rows, part in rates)
    table.add_row("products, TFLOP/s by rows per group", reached, "")
    host = " ".join(f"{name}:{seconds * 1e3:.2f}" for name, seconds in profile.host_seconds.items())
    table.add_row("host, ms per layer and step", f"{host} spilling:+{profile.spill_seconds * 1e3:.2f}", "")
    return table


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """GB/s by size."""
    return " ".join(f"{_size(size)}:{size / seconds / 1e9:.3g}" for size, seconds in points)


def _size(size: float) -> str:
    return f"{size / 2**20:.0f}M" if size >= 2**20 else f"{size / 2**10:.0f}K"


def _check_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="one layer alone, forward and backward: predicted and measured, ms")
    heads = ("routing", "strategy", "predicted", "compute", "tokens", "weights", "measured", "error")
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:2] else "right")
    for row in rows:
        parts = [
            f"{row[name]:.2f}" for name in ("predicted_ms", "compute_ms", "tokens_ms", "weights_ms", "measured_ms")
        ]
        error = row["predicted_ms"] / row["measured_ms"] - 1
        table.add_row(row["routing"], row["strategy"], *parts, f"{error:+.0%}")
    return table


def _alternatives_table(
    found: list[Alternative], chosen: Alternative, sizes: LayerSizes, layers: int, nodes: int, width: int, tokens: int
) -> Table:
    title = (
        f"E {sizes.experts} H {sizes.hidden} I {sizes.intermediate} K {sizes.top_k}, {layers} layers, {tokens} tokens "
        f"per rank, {nodes} x {width} ranks: predicted, ms per micro-batch"
    )
    table = Table(title=title, caption="mean over even and skewed loads; memory: of one layer on the fullest rank")
    heads = ("strategy", "slots", "alpha", "m", "MoE layers", "one layer", "compute", "tokens", "weights", "(hidden)")
    for head in (*heads, "GiB", "fits"):
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for one in found:
        row, config = _figures(one), one.config
        slots = config.slots_for(sizes.experts, nodes * width) if one.strategy.startswith("fsep") else ""
        spills = one.strategy in ("llep", "fsep+llep")
        times = [row[f"{name}_ms"] for name in ("predicted", "compute", "tokens", "weights", "hidden")]
        table.add_row(
            one.shown,
            str(slots),
            f"{config.capacity_factor:g}" if spills else "",
            str(config.min_tokens_per_gemm) if spills else "",
            f"{layers * times[0]:.1f}",
            *(f"{value:.2f}" for value in times),
            f"{row['peak_gib']:.2f}",
            "yes" if one.fits else "no",
            style="bold" if one is chosen else None,
        )
    return table
