"""A soak from start to end: processes for each part, the unpatched run beside them, and what is held to what."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_laer.soak.task import Settings

TOLERANCE = 1e-5
LAST = 200
FLAT = 1.0
# Fewer steps than this say nothing about memory: allocators take some hundred to settle.
LEAST_STEPS = 300


@dataclass(frozen=True)
class Line:
    """One thing that a soak is held to.

    Args:
        what: Which.
        found: What came out.
        wanted: What should have.
        good: Whether it did; ``None`` where the run was too short to say.
    """

    what: str
    found: str
    wanted: str
    good: bool | None


def soak(settings: Settings, say: Callable[[str], None]) -> list[Line]:
    """Runs all parts and returns what came out.

    Args:
        settings: The soak.
        say: Told of progress.

    Raises:
        RuntimeError: A process failed; it has written why.
    """
    with tempfile.TemporaryDirectory(prefix="hf_laer_soak_") as name:
        folder = Path(name)
        context = multiprocessing.get_context("spawn")
        plain = context.Process(target=_plain, args=(settings, folder))
        plain.start()
        parts = []
        try:
            for start, stop, ranks in settings.parts():
                began = time.monotonic()
                parts.append(_run_part(context, settings, folder, start, stop, ranks))
                say(_progress(parts[-1][0], start, stop, ranks, time.monotonic() - began))
            plain.join()
        finally:
            plain.kill()
        if plain.exitcode:
            raise RuntimeError(f"the unpatched run ended with exit code {plain.exitcode}")
        return report(parts, json.loads((folder / "plain.json").read_text()))


def _progress(told: dict[str, Any], start: int, stop: int, ranks: int, seconds: float) -> str:
    worst = max(max(one["gradient"], one["update"]) for one in told["compared"])
    return (
        f"steps {start} to {stop} on {ranks} ranks: {seconds:.0f} s, loss {told['losses'][-1]:.3f}, "
        f"{len(told['compared'])} steps beside the shadow, farthest {worst:.1e}"
    )


def _run_part(
    context: Any, settings: Settings, folder: Path, start: int, stop: int, ranks: int
) -> list[dict[str, Any]]:
    """Each rank's account of one part."""
    processes = [context.Process(target=_rank, args=(settings, folder, start, stop, r, ranks)) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            if any(process.exitcode for process in processes):
                break
        failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
        if failed:
            raise RuntimeError(f"steps {start} to {stop}: ranks ended with exit codes {failed}")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"told-{start}-{rank}.json").read_text()) for rank in range(ranks)]


def _rank(settings: Settings, folder: Path, start: int, stop: int, rank: int, ranks: int) -> None:
    # As a launcher would: Accelerate knows its rank by these.
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import torch
    import torch.distributed as dist

    from hf_laer.soak.part import Part

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{start}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    told = Part(settings, folder, start, stop).run()
    (folder / f"told-{start}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _plain(settings: Settings, folder: Path) -> None:
    import torch

    from hf_laer.soak.task import plain_losses

    torch.set_num_threads(1)
    (folder / "plain.json").write_text(json.dumps(plain_losses(settings)))


def report(parts: list[list[dict[str, Any]]], plain: list[float]) -> list[Line]:
    """What a soak is held to.

    Args:
        parts: Each rank's account, part by part.
        plain: The unpatched run's losses.
    """
    first = [ranks[0] for ranks in parts]
    compared = [one for told in first for one in told["compared"]]
    lines = []
    for what in ("gradient", "update"):
        worst = max(compared, key=lambda one: float(one[what]))
        found = f"{worst[what]:.1e} ({worst[f'{what}_of']}, step {worst['step']})"
        good = worst[what] <= TOLERANCE
        lines.append(Line(f"{what}s of {len(compared)} steps", found, f"at most {TOLERANCE:.0e} apart", good))
    lost = [name for told in first for name in told["lost"]]
    found = f"{len(parts) - 1} resumes, {len(lost)} tensors changed {' '.join(lost[:3])}"
    lines.append(Line("weights and moments after resumes", found, "as saved, bit by bit", not lost))
    lines.append(_loss_line([loss for told in first for loss in told["losses"]], plain))
    lines.append(_memory_line(parts))
    before, after = (statistics.fmean(told[key] for told in first) for key in ("before", "after"))
    moved = sum(told["spilled"] + told["moved"] for told in first)
    found = f"max/mean {before:.2f} > {after:.2f}; {moved} tokens spilled or replicas moved"
    found = found if before else "no layer was run by hf_laer"
    lines.append(Line("balance of ranks", found, "for information", None))
    return lines


def _loss_line(losses: list[float], plain: list[float]) -> Line:
    last, other = losses[-LAST:], plain[-LAST:]
    error = statistics.stdev(other) / len(other) ** 0.5 if len(other) > 1 else 0.0
    apart = abs(statistics.fmean(last) - statistics.fmean(other))
    found = f"{statistics.fmean(last):.5f}, unpatched {statistics.fmean(other):.5f}"
    wanted = f"at most 3 standard errors ({3 * error:.5f}) apart"
    return Line(f"mean loss of the last {len(last)} steps", found, wanted, apart <= 3 * error)


def _memory_line(parts: list[list[dict[str, Any]]]) -> Line:
    """The steepest rank of the parts that are long enough."""
    slopes = [slope(told["memory"]) for ranks in parts for told in ranks if _span(told["memory"]) >= LEAST_STEPS]
    wanted = f"less than {FLAT:.0f} MB per 1,000 steps"
    if not slopes:
        return Line("resident memory", f"parts of fewer than {LEAST_STEPS} steps say nothing", wanted, None)
    found = f"{max(slopes):+.2f} MB per 1,000 steps on the steepest rank, median {statistics.median(slopes):+.2f}"
    return Line("resident memory", found, wanted, max(slopes) < FLAT)


def _span(memory: list[list[int]]) -> int:
    return memory[-1][0] - memory[0][0] if memory and memory[0][1] else 0


def slope(memory: list[list[int]]) -> float:
    """MB per 1,000 steps of the second half of a part, by least squares through the least of each five samples."""
    settled = np.array(memory[len(memory) // 2 :], float)
    windows = [window[window[:, 1].argmin()] for window in np.array_split(settled, max(2, len(settled) // 5))]
    steps, size = np.array(windows).T
    return float(np.polyfit(steps, size / 2**20, 1)[0] * 1000)
