"""``hf-laer bench suite``: the papers' own comparisons on this host's GPUs, resumable. See ``docs/suite.md``."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hf_laer.bench.models import Job
from hf_laer.bench.suite.cells import GIB, Cell, Folder, Kept, run_cells
from hf_laer.bench.suite.parts import PARTS, SCALES, Setup
from hf_laer.bench.suite.report import as_markdown, sections
from hf_laer.cli.bench_layer import ALL_RIVALS
from hf_laer.cli.ranks import joined, version_of, write_aside, write_figures
from hf_laer.profile import read_profile

# Of a GPU's memory: what the allocator cannot use is somewhere.
ROOM = 0.92
_PASSED_ON = ("out", "parts", "minutes", "scale", "memory", "profile", "trace", "model_layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hf-laer bench suite``."""
    parser.add_argument("--gpus", type=int, help="ranks, one per GPU; processes where there is none (default all GPUs)")
    parser.add_argument("--out", type=Path, default=Path("outputs/suite"), help="folder of results (outputs/suite)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--minutes", type=float, default=2.5, help="for each part; nothing begins later (default 2.5)")
    parser.add_argument("--scale", choices=SCALES, default="full", help="tiny: to see that everything runs")
    parser.add_argument("--memory", type=float, help="GiB of a GPU to stay within (default 92%% of it)")
    parser.add_argument("--profile", type=Path, help="of hf-laer tune; auto and spilling go by it")
    parser.add_argument("--trace", type=Path, help="recorded routing for whole models (default: loads that wander)")
    parser.add_argument("--model-layers", type=int, help="decoder layers of whole models (default 8)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures on the ranks of torchrun, or starts ranks of its own."""
    _check(args)
    if "RANK" in os.environ or dist.is_initialized():
        return _on_ranks(args, console)
    there = torch.cuda.device_count()
    ranks = args.gpus or there or 1
    if there and ranks > there:
        raise ValueError(f"--gpus {ranks}, but this host has {there}")
    return _on_ranks(args, console) if ranks == 1 else _start(args, ranks, console)


def _check(args: argparse.Namespace) -> None:
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        raise ValueError(f"--parts {', '.join(unknown)} unknown; known: {', '.join(PARTS)}")
    for name in ("gpus", "model_layers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if not args.minutes >= 0:
        raise ValueError(f"--minutes {args.minutes} must be at least 0")
    if args.trace is not None and not args.trace.is_file():
        raise ValueError(f"--trace {args.trace} is no file")


def _start(args: argparse.Namespace, ranks: int, console: Console) -> int:
    """Runs the command on ranks of its own, again where one cell ended them, as long as that gets further."""
    flags = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in _PASSED_ON]
    told = [text for flag, value in flags if value is not None for text in (flag, str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    before, code = -1, 0
    while (now := _progress(args.out)) > before:
        if code:
            console.print("a cell ended the ranks: they are started again for the others")
        before = now
        code = subprocess.run([*torchrun, "-m", "hf_laer.cli", "bench", "suite", *told], check=False).returncode
        if code == 0:
            return 0
    return code


def _progress(out: Path) -> int:
    """Grows with each cell that ends or begins; cells and attempts are bounded, so it is too."""
    cells = out / "cells"
    return len(list(cells.glob("*.json"))) + sum(int(file.read_text()) for file in cells.glob("*.begun"))


def _on_ranks(args: argparse.Namespace, console: Console) -> int:
    hosted = dist.is_initialized()
    with joined() as device:
        try:
            _measure(args, device, console)
        except Exception as error:
            if hosted or isinstance(error, ValueError | OSError):
                raise
            # Taking groups down may wait for ranks that wait for this one.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return 0


def _measure(args: argparse.Namespace, device: torch.device, console: Console) -> None:
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if args.gpus not in (None, ranks):
        raise ValueError(f"--gpus {args.gpus}, but {ranks} ranks run")
    profile = read_profile(args.profile) if args.profile else None
    settings = profile, args.profile, args.trace and args.trace.resolve(), args.model_layers
    setup = Setup(SCALES[args.scale], device, ALL_RIVALS, _train, *settings)
    configuration = _configuration(args.scale, setup, device)
    folder = Folder(args.out)
    _first_checks(folder, configuration)
    by_part = {part: list(PARTS[part](setup)) for part in PARTS}
    everything, late = [cell for cells in by_part.values() for cell in cells], []
    try:
        for part in args.parts.split(","):
            late += _run_part(by_part[part], folder, args, device, console)
            setup.give_up()
    finally:
        # Also when one cell fails: the others took minutes.
        if first:
            _write(folder, everything, configuration)
    if first:
        _show(folder, everything, configuration, late, console)


def _run_part(
    cells: Sequence[Cell], folder: Folder, args: argparse.Namespace, device: torch.device, console: Console
) -> list[Cell]:
    room = args.memory if args.memory is not None else float("inf")
    if args.memory is None and device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory * ROOM / GIB
    return run_cells(cells, folder, args.minutes, room, device, lambda text: console.print(text, highlight=False))


def _train(job: Job, contender: str, routings: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    # Transformers takes seconds to import, and the other parts need none of it.
    from hf_laer.integrations.bench.sft import prepared

    with prepared(job, contender, device) as trained:
        return [trained(routing).as_dict() for routing in routings]


def _configuration(scale: str, setup: Setup, device: torch.device) -> dict[str, Any]:
    return {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "dtype": str(setup.dtype).removeprefix("torch."),
        "scale": scale,
        "profile": setup.profile.digest() if setup.profile is not None else "shipped",
        "trace": str(setup.trace) if setup.trace is not None else "none",
        "torch": str(torch.__version__),
        "transformers": version_of("transformers"),
        "hf_laer": version_of("hf_laer"),
        "code": _code(),
    }


def _code() -> str:
    """A hash of this package's sources: cells of different code are not to be mixed."""
    sha = hashlib.sha256()
    for package in ("hf_laer", "hf_laer.integrations"):
        found = importlib.util.find_spec(package)
        for folder in map(Path, found.submodule_search_locations or () if found is not None else ()):
            for file in sorted(folder.rglob("*.py")):
                sha.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return sha.hexdigest()[:12]


def _first_checks(folder: Folder, configuration: dict[str, Any]) -> None:
    """The first rank's word on the folder, raised on all."""
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.check(configuration)
        except (ValueError, OSError) as error:
            told = [str(error)]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise ValueError(told[0])


def _known(folder: Folder, cells: Sequence[Cell]) -> list[Kept]:
    return [kept for cell in cells if (kept := folder.find(cell)) is not None]


def _write(folder: Folder, cells: Sequence[Cell], configuration: dict[str, Any]) -> None:
    """``suite.json``, ``suite.md`` and pictures, of all that is known."""
    known = _known(folder, cells)
    write_figures(folder.path / "suite.json", {"configuration": configuration, "cells": [vars(one) for one in known]})
    try:
        from hf_laer.bench.suite.pictures import draw

        pictures = draw(known, folder.path)
    except ImportError:
        pictures = []
    text = as_markdown(configuration, sections(known, configuration["ranks"]), pictures)
    write_aside(folder.path / "suite.md", text)


def _show(
    folder: Folder, cells: Sequence[Cell], configuration: dict[str, Any], late: Sequence[Cell], console: Console
) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in configuration.items()), highlight=False)
    for section in sections(_known(folder, cells), configuration["ranks"]):
        console.print(section.as_table())
    if late:
        names = ", ".join(sorted({cell.part for cell in late}))
        console.print(f"no time was left for {len(late)} cells of {names}: start the command again to go on")
    console.print(f"written: {folder.path / 'suite.md'}, suite.json, pictures", highlight=False)
