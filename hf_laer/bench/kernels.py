"""The engine's kernels alone, on one device: bytes or operations per second, beside the device's own limits.

The limits are measured in the same run: a copy of a gibibyte, and one large product. Bytes are those that must move:
every operand read once, every result written once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_laer.bench.layer import LayerShape
from hf_laer.bench.routing import routing
from hf_laer.compute.gate import FusedGate, Gate
from hf_laer.compute.grouped_gemm import Arrangement, Groups, alone_from, rows_outer, rows_times
from hf_laer.compute.routing import arrive, count, leave, shares_and_rows
from hf_laer.compute.rows import gather_sum
from hf_laer.compute.segments import Blocks, Part, add_parts, copy_all
from hf_laer.plan import chunk_owners, ep, own_part

BYTES, FLOPS = "GB/s", "TFLOP/s"
GATES = {
    "silu": FusedGate(interleaved=False, clamped=False),
    "gpt-oss": FusedGate(interleaved=True, clamped=True, alpha=1.702, limit=7.0),
}


@dataclass(frozen=True)
class Rate:
    """One kernel under one routing.

    Args:
        kernel: Its name.
        routing: The scenario; empty where it does not matter.
        ms: Median milliseconds.
        rate: In ``unit``.
        unit: ``GB/s`` or ``TFLOP/s``.
        of_limit: The rate as a share of the device's own.
    """

    kernel: str
    routing: str
    ms: float
    rate: float
    unit: str
    of_limit: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """Something to time: its name, its call, and how many bytes it moves or operations it does."""

    kernel: str
    call: Callable[[], Any]
    amount: float
    unit: str


def measure_kernels(
    shape: LayerShape, scenarios: list[str], device: torch.device, dtype: torch.dtype, iterations: int
) -> list[Rate]:
    """Times every kernel for the rows of one rank that holds all experts of ``shape``."""
    limits = {BYTES: _copy(device), FLOPS: _product(device, dtype)}
    found, peak = [], {}
    for job in limits.values():
        ms = _median_ms(job.call, device, iterations)
        peak[job.unit] = job.amount / ms
        found.append(_rate(job, "", ms, peak))
    jobs = {"": [*_gates(shape, device, dtype), *_messages(shape, device, dtype)]}
    jobs |= {scenario: [*_tables(shape, scenario, device, dtype), *_products(shape, scenario, device, dtype)]
             for scenario in scenarios}  # fmt: skip
    for scenario, several in jobs.items():
        found += [_rate(job, scenario, _median_ms(job.call, device, iterations), peak) for job in several]
    return found


def _rate(job: Job, scenario: str, ms: float, peak: dict[str, float]) -> Rate:
    rate = job.amount / ms
    return Rate(job.kernel, scenario, ms, rate / (1e6 if job.unit == BYTES else 1e9), job.unit, rate / peak[job.unit])


def _copy(device: torch.device) -> Job:
    source = torch.zeros(2**30 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Job("copy, the limit", lambda: target.copy_(source), 2 * source.numel(), BYTES)


def _product(device: torch.device, dtype: torch.dtype) -> Job:
    size = 8192 if device.type == "cuda" else 128
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return Job("one product, the limit", lambda: left @ right, 2 * size**3, FLOPS)


def _gates(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> Iterator[Job]:
    rows, half = shape.tokens * shape.top_k, shape.intermediate
    up, grad = (torch.randn(rows, size, dtype=dtype, device=device) for size in (2 * half, half))
    factors = torch.rand(rows, device=device)
    slot = torch.arange(rows, device=device) * shape.experts // rows
    for name, fused in GATES.items():
        gate = Gate(fused.reference, fused)
        bias = torch.randn(shape.experts, 2 * half, dtype=dtype, device=device) if fused.clamped else None
        one = rows * half * dtype.itemsize
        yield Job(f"gate, {name}", partial(gate.forward, up, bias, slot), 3 * one, BYTES)
        yield Job(f"gate backward, {name}", partial(gate.backward, up, bias, slot, grad, factors), 6 * one, BYTES)


def _messages(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> Iterator[Job]:
    """Half of each expert's rows to a message and from one, and gradients of all experts summed at home."""
    sizes = min(shape.experts, 16), 2 * shape.intermediate, shape.hidden
    experts, masters = (torch.randn(sizes, dtype=kind, device=device) for kind in (dtype, torch.float32))
    half, every = range(shape.intermediate), np.arange(len(experts))
    message = torch.randn_like(experts[:, : len(half)])
    moved, whole = message.numel() * dtype.itemsize, Blocks.whole(message)
    here, exact = Blocks(experts, every, half), Blocks(masters, every, half)
    yield Job("packing", partial(copy_all, [whole], [here]), 2 * moved, BYTES)
    yield Job("packing of float32", partial(copy_all, [whole], [exact]), moved + message.numel() * 4, BYTES)
    yield Job("unpacking", partial(copy_all, [here], [whole]), 2 * moved, BYTES)
    parts = [Part.whole(experts), Part.whole(torch.randn_like(experts))]
    read, written = 2 * experts.numel() * dtype.itemsize, masters.numel() * 4
    yield Job("sum of gradients", partial(add_parts, masters, parts, 0.0, 0.5), read + written, BYTES)


def _tables(shape: LayerShape, scenario: str, device: torch.device, dtype: torch.dtype) -> Iterator[Job]:
    """Routing tables, gathers and weighted sums, of one rank that sends all to itself."""
    index = routing(scenario, shape.tokens, shape.experts, shape.top_k, 0, device)
    weights = torch.rand(index.shape, dtype=dtype, device=device)
    counted = count(index, shape.experts)
    loads = counted.loads.cpu().numpy()[None]
    plan = ep(loads, chunk_owners(shape.experts, 1))
    own = own_part(plan, loads, 0)
    arrangement = Arrangement.of(own.slots.tolist(), (shape.experts,), None)
    shares, rows_of = shares_and_rows(plan.split, np.zeros(shape.experts, np.int64), own, arrangement, device)
    leaving = partial(leave, index, weights, shares, counted)
    left, rows = leaving(), shape.tokens
    arriving = partial(arrive, left.message, rows_of.edges[1], rows, shape.top_k, rows_of.slots[0])
    tables = arriving()
    choices, word = index.numel(), 8
    yield Job("counts", partial(count, index, shape.experts), choices * word, BYTES)
    yield Job("tables of what leaves", leaving, choices * (4 * word + 12), BYTES)
    yield Job("tables of what arrived", arriving, choices * (4 * word + 16), BYTES)
    hidden = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
    many = torch.randn(choices, shape.hidden, dtype=dtype, device=device)
    moved = (choices + rows) * shape.hidden * dtype.itemsize
    yield Job("gather", lambda: hidden[tables.source_row], choices * shape.hidden * dtype.itemsize * 2, BYTES)
    summed = partial(gather_sum, many, tables.row_places, dtype, weights=tables.gates)
    yield Job("weighted sum", summed, moved, BYTES)


def _products(shape: LayerShape, scenario: str, device: torch.device, dtype: torch.dtype) -> Iterator[Job]:
    index = routing(scenario, shape.tokens, shape.experts, shape.top_k, 0, device)
    least = alone_from(2 * shape.intermediate, shape.hidden)
    groups = Groups.of(count(index, shape.experts).loads.tolist(), device, least)
    for name, inner, outer in (
        ("up", shape.hidden, 2 * shape.intermediate),
        ("down", shape.intermediate, shape.hidden),
    ):
        rows, grad = (torch.randn(index.numel(), size, dtype=dtype, device=device) for size in (inner, outer))
        weight = torch.randn(shape.experts, outer, inner, dtype=dtype, device=device)
        work = 2 * index.numel() * inner * outer
        calls: dict[str, Callable[[], Any]] = {
            "": partial(rows_times, rows, (weight.transpose(1, 2),), groups),
            ", rows' gradient": partial(rows_times, grad, (weight,), groups),
            ", weight gradient": partial(rows_outer, grad, rows, groups, (shape.experts,)),
        }
        for what, call in calls.items():
            yield Job(f"product {name}{what}", call, work, FLOPS)


def _median_ms(call: Callable[[], Any], device: torch.device, iterations: int) -> float:
    for _ in range(3):
        call()
    if device.type != "cuda":
        return statistics.median(_host_ms(call) for _ in range(iterations))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def _host_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
