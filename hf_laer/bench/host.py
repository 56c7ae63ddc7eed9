"""What this host can do: copies, exchanges, grouped products and the host's own time, measured on all ranks at once.

Every time is the slowest rank's, so all ranks see the same numbers and stop alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_laer.bench.layer import Bench, LayerShape, measure, timed
from hf_laer.bench.rivals import BenchWeights, Products, Whole
from hf_laer.comm.base import Communicator
from hf_laer.comm.groups import communicators
from hf_laer.comm.watch import Watch
from hf_laer.config import FSDP2, STRATEGIES, UNION
from hf_laer.profile import Curve, Profile, fit_line, shipped_profile

ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Of all groups together, so that their activations fit into any GPU.
MOST_ROWS = 2**17
KIB, MIB = 2**10, 2**20
REPEATS = 5
# Calls of what is timed: those timed, and two that warm up; some of them several in a row.
ROUNDS = REPEATS + 2


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        seconds: Roughly, for each of the curves.
        transfer: Largest exchange of one rank, bytes.
        weights: Bytes of experts in the products, at most.
        rows: Rows per group of the products.
    """

    seconds: float = 4.0
    transfer: int = 256 * MIB
    weights: int = 2048 * MIB
    rows: tuple[int, ...] = ROWS

    @classmethod
    def on(cls, device: torch.device) -> Effort:
        """What suits a device: on a CPU all is smaller."""
        return cls() if device.type == "cuda" else cls(2.0, 32 * MIB, 64 * MIB, ROWS[:7])


def warm_up(device: torch.device) -> None:
    """Compiles planners and kernels, which only the first run on a machine does. Collective over the world."""
    _spill_seconds(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def measure_host(
    device: torch.device, ranks_per_node: int, sizes: BenchWeights, effort: Effort | None = None
) -> Profile:
    """Measures this host. Collective over the world.

    Args:
        device: This rank's.
        ranks_per_node: Ranks that share a node; they divide the world.
        sizes: The experts to form products of, and the dtype.
        effort: How much; ``None`` means what suits the device.

    Raises:
        ValueError: Nodes of unequal size.
    """
    ranks, effort = dist.get_world_size(), effort or Effort.on(device)
    width = min(ranks_per_node, ranks)
    if ranks % width:
        raise ValueError(f"{ranks} ranks are not nodes of {width}: set --ranks-per-node to a divisor")
    groups = communicators(init_device_mesh(device.type, (ranks,)), width, Watch())
    on_gpu = device.type == "cuda"
    curves: dict[str, Curve] = {"copy": _copies(device, effort), "products": _products(sizes, device, effort)}
    rates = [rows * _row_flops(sizes) / seconds for rows, seconds in curves["products"]]
    found: dict[str, Any] = {
        "flops": max(rates),
        "gemm_tokens": tuple(int(rows) for rows, _ in curves["products"]),
        "gemm_efficiency": tuple(rate / max(rates) for rate in rates),
        "copy_bandwidth": curves["copy"][-1][0] / curves["copy"][-1][1],
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
        "host_seconds": {name: _host_seconds(name, device, sizes.dtype) for name in (*STRATEGIES, FSDP2)},
        "spill_seconds": _spill_seconds(device, sizes.dtype),
        **_links(groups.tokens, groups.weights, device, effort, curves),
    }
    shipped = shipped_profile(torch.cuda.get_device_name(device) if on_gpu else "cpu")
    assumed = tuple(name for name in shipped.assumed if name not in found)
    # The device's name may differ between ranks; all else is the slowest rank's already.
    box = [replace(shipped, **found, assumed=assumed, measured=curves).to_dict()]
    dist.broadcast_object_list(box, src=0, device=device)
    return Profile.from_dict(box[0])


def _links(
    node: Communicator, world: Communicator, device: torch.device, effort: Effort, curves: dict[str, Curve]
) -> dict[str, float]:
    """Latency and bandwidth inside a node and between nodes, as far as there are any; adds to ``curves``."""
    found: dict[str, float] = {}
    if world.size > 1:
        curves["broadcast"] = _growing(lambda size: _broadcast(size, device), device, effort)
    if node.size > 1:
        curves["all_to_all"] = _growing(lambda size: _exchange(node, size, device), device, effort)
        found["intra_latency"], found["intra_bandwidth"] = fit_line(curves["all_to_all"])
    if world.size > node.size:
        # Of what a rank sends to all others, so much leaves its node.
        share = (world.size - node.size) / (world.size - 1)
        between = _growing(lambda size: _exchange(world, size, device), device, effort)
        curves["all_to_all_between_nodes"] = tuple((size * share, seconds) for size, seconds in between)
        found["inter_latency"], found["inter_per_rank"] = fit_line(curves["all_to_all_between_nodes"])
    return found


def _growing(make: Callable[[int], Callable[[], object]], device: torch.device, effort: Effort) -> Curve:
    """Seconds by bytes, four times as many each time, until the largest or the end of the time for it."""
    points: list[tuple[float, float]] = []
    size, spent = 16 * KIB, 0.0
    while size <= effort.transfer and (len(points) < 2 or spent * 4 < effort.seconds):
        seconds = _seconds(make(size), device)
        spent += seconds * ROUNDS * _in_a_row(device)
        points.append((float(size), seconds))
        size *= 4
    return tuple(points)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """One call of several in a row: the host is ahead of a GPU then, as it is in training."""
    inner = _in_a_row(device)

    def several() -> None:
        for _ in range(inner):
            call()

    several()
    return timed(several, device, REPEATS)[0] / 1e3 / inner


def _in_a_row(device: torch.device) -> int:
    return 4 if device.type == "cuda" else 1


def _exchange(comm: Communicator, size: int, device: torch.device) -> Callable[[], object]:
    """An even exchange in which each rank sends ``size`` bytes to others."""
    each = max(1, size // (comm.size - 1))
    rows = torch.zeros(each * comm.size, dtype=torch.uint8, device=device)
    return lambda: comm.all_to_all(rows, [each] * comm.size, [each] * comm.size)


def _broadcast(size: int, device: torch.device) -> Callable[[], object]:
    values = torch.zeros(size, dtype=torch.uint8, device=device)
    return lambda: dist.broadcast(values, src=0)


def _copies(device: torch.device, effort: Effort) -> Curve:
    """Seconds by bytes read and written."""

    def one(size: int) -> Callable[[], object]:
        source, target = (torch.zeros(size // 2, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: target.copy_(source)

    return _growing(one, device, effort)


def _products(sizes: BenchWeights, device: torch.device, effort: Effort) -> Curve:
    """Seconds of one group's products, forward and backward, by its rows."""
    expert = _row_flops(sizes) // 6 * torch.empty(0, dtype=sizes.dtype).element_size()
    share = -(-sizes.experts // dist.get_world_size())
    groups = max(1, min(share, effort.weights // expert))
    points: list[tuple[float, float]] = []
    spent, hidden = 0.0, torch.zeros(1, sizes.hidden, dtype=sizes.dtype, device=device, requires_grad=True)
    grad = torch.ones_like(hidden)
    for rows in effort.rows:
        own = min(groups, max(1, MOST_ROWS // rows))
        some = replace(sizes, experts=own * dist.get_world_size())
        seconds = _seconds(_product_step(some, rows * own, hidden, grad), device)
        spent += seconds * ROUNDS * _in_a_row(device)
        points.append((float(rows), seconds / own))
        if spent * 2 > effort.seconds:
            break
    return tuple(points)


def _product_step(sizes: BenchWeights, rows: int, hidden: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    products, index = Products(sizes), torch.empty(rows, 1, dtype=torch.int64)
    return lambda: products(hidden, index, grad).backward(grad)


def _row_flops(sizes: BenchWeights) -> int:
    """FLOPs of one row through one expert, forward and backward."""
    return 3 * 6 * sizes.hidden * sizes.intermediate


def _host_seconds(strategy: str, device: torch.device, dtype: torch.dtype) -> float:
    """A layer so small that the host and the exchanges' latencies are all there is.

    Of one that is left to FSDP2, without FSDP2's part: that is done for the rest of the decoder layer anyway. Where
    experts may live whole, that is ``llep``'s; here they are sharded.
    """
    name = f"{UNION}:sharded" if strategy == UNION else strategy
    return measure(_smallest(), name, "balanced", device, dtype, REPEATS, {FSDP2: Whole}).step_ms / 1e3


def _spill_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """What the same layer takes longer where it spills."""
    settings = {"imbalance_threshold": 1.0, "min_tokens_per_gemm": 1}
    plain, spilling = Bench(_smallest(), device, dtype, settings=settings).measure(["ep", "llep"], "95:2", REPEATS)
    return max(0.0, spilling.step_ms - plain.step_ms) / 1e3


def _smallest() -> LayerShape:
    return LayerShape(experts=4 * dist.get_world_size(), hidden=64, intermediate=64, top_k=2, tokens=16)
