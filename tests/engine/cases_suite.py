"""Cases of ``hf-laer bench suite`` on ranks of a pool."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_laer.bench.layer import Bench, Contender, LayerShape
from hf_laer.bench.routing import routings
from hf_laer.bench.suite.cells import Cell, Folder, run_cells
from hf_laer.cli.main import main
from hf_laer.profile import shipped_profile
from tests.models import assert_close, repeatable

CPU = torch.device("cpu")


def suite_command(out: str, flags: Sequence[str] = ()) -> int:
    """The command on every rank, small enough for CPUs."""
    return main(["bench", "suite", "--scale", "tiny", "--out", out, *flags])


def odd_cells(out: str) -> tuple[list[str], list[str]]:
    """Cells that are too large, refused, break one rank, or come too late; what ran, and what there was no time for."""
    ran: list[str] = []

    def cell(name: str, error: Exception | None = None, need: float = 0.0) -> Cell:
        def run() -> list[dict[str, Any]]:
            ran.append(name)
            if error is not None:
                raise error
            return [{"rank": dist.get_rank()}]

        return Cell("part", name, run, {"is": name}, need)

    def breaks() -> list[dict[str, Any]]:
        ran.append("breaks")
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory\nin detail")
        while not Path(out, "cells", "part_breaks.json").exists():
            time.sleep(0.01)
        raise RuntimeError("the others are gone")

    refused = cell("refused", ValueError("no such thing"))
    cells = [cell("large", need=9.0), refused, cell("good"), Cell("part", "breaks", breaks), cell("after")]
    for _ in range(2):
        try:
            run_cells(cells, Folder(Path(out)), 1.0, 8.0, CPU, ran.append)
        except RuntimeError:  # out of memory is one
            ran.append("started again")
    late = run_cells([cell("late"), cell("good")], Folder(Path(out)), 0.0, 8.0, CPU, ran.append)
    return ran, [one.name for one in late]


def contender_equals_fsdp(name: str, scenario: str, steps: int) -> list[list[list[int]]]:
    """A contender of the engine's kind and FSDP's corner over some steps: output, and gradients of tokens and weights.

    Returns:
        The experts in the first rank's slots at each step.
    """
    shape = LayerShape(experts=8, hidden=8, intermediate=12, top_k=3, tokens=20)
    settings = {"imbalance_threshold": 1.0, "min_tokens_per_gemm": 1, "slots_per_rank": 5}
    # Links so fast that FlexMoE finds moves of experts worth while.
    profile = replace(shipped_profile("cpu"), intra_bandwidth=1e15)
    bench = Bench(shape, CPU, torch.float32, profile=profile, settings=settings)
    contenders = [bench.contender("fsdp"), bench.contender(name)]
    series = routings(scenario, (20, 8, 3), dist.get_rank(), dist.get_world_size(), CPU, steps)
    hidden, gates = torch.randn(20, 8), torch.rand(20, 3)
    held = []
    # So that each step has the layout of the one before.
    with repeatable():
        for index in itertools.islice(itertools.cycle(series), steps):
            ours, theirs = (_results(contender, hidden, index, gates) for contender in contenders)
            for us, them in zip(ours, theirs, strict=True):
                assert_close(us, them, name)
            held.append([list(row) for row in contenders[1].engine._before[1]])
    return held


def _results(
    contender: Contender, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor
) -> list[torch.Tensor | None]:
    for weight in contender.weights:
        weight.grad = None
    leaf, weights = hidden.clone().requires_grad_(), gates.clone().requires_grad_()
    out = contender.run(leaf, [index], weights)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, weights.grad, *(weight.grad.full_tensor() for weight in contender.weights)]
