"""Cases of ``hf-laer bench suite`` on ranks of a pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_laer.bench.layer import Bench, LayerShape
from hf_laer.bench.suite.cells import Cell, Folder, run_cells
from hf_laer.cli.main import main
from tests.models import assert_close

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


def repeated_choices_equal(name: str) -> None:
    """Tokens that name one expert more than once: a strategy and FSDP's corner."""
    shape = LayerShape(experts=6, hidden=8, intermediate=12, top_k=3, tokens=20)
    bench = Bench(shape, CPU, torch.float32, settings={"imbalance_threshold": 1.0, "min_tokens_per_gemm": 1})
    index = torch.tensor([[4, 4, 4], [4, 4, 1], [0, 4, 0], [2, 3, 5]]).repeat(5, 1)
    hidden, gates = torch.randn(20, 8), torch.rand(20, 3)
    results = []
    for contender in (bench.contender("fsdp"), bench.contender(name)):
        leaf, weights = hidden.clone().requires_grad_(), gates.clone().requires_grad_()
        out = contender.run(leaf, [index], weights)
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad, weights.grad))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, name)
