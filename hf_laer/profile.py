"""What a machine can do: measured by ``hf-laer tune``, or shipped for GPUs that were measured before.

A profile is one JSON object, checked field by field when it is read; nothing in it is ever run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_laer.config import FSDP2, LARGEST_FILE, STRATEGIES
from hf_laer.plan.topology import GEMM_EFFICIENCY, GEMM_TOKENS, PROFILES, Topology, read_topology

FORMAT = "hf_laer profile 1"
LARGEST_NUMBER = 2.0**62
LONGEST = 4096
# Host time of one layer, forward and backward, where it was not measured: on the host of two H200 (that of a layer that
# is left to FSDP2 is an estimate: about 80 small operations of 10 to 20 us), and of two processes on two CPU cores.
HOST_SECONDS = {"ep": 3.9e-3, "llep": 3.9e-3, "fsep": 7.5e-3, "fsep+llep": 6.8e-3, "fsdp": 5.1e-3, FSDP2: 1.8e-3}
_CPU_HOST_SECONDS = {"ep": 7.3e-3, "llep": 7.6e-3, "fsep": 11e-3, "fsep+llep": 12e-3, "fsdp": 6.1e-3, FSDP2: 1.3e-3}
# By so much the smallest layer took longer where it spilled, on the same host: what `hf-laer tune` measures.
SPILL_SECONDS = 1.5e-3
# Bytes read and written per second in the memory of the GPUs that profiles are shipped for, four fifths of the data
# sheet's; and on a CPU rank under gloo, where every figure is a rough one.
_COPIES = {"h200": 3.8e12, "h100": 2.7e12, "a100": 1.6e12}
_CPU = {"flops": 50e9, "intra_bandwidth": 1e9, "inter_per_rank": 1e9, "copy_bandwidth": 5e9}
_CPU_LATENCY = 300e-6
# Efficiency by tokens per group on a CPU, where small products are not slow.
_CPU_CURVE = ((1, 16, 128), (0.2, 0.8, 1.0))

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Profile:
    """One kind of machine: what a rank does, and its links.

    Args:
        device: Name of a rank's device.
        flops: FLOP/s that large products reach.
        gemm_tokens: Ascending rows per group.
        gemm_efficiency: The fraction of ``flops`` that groups of so many rows reach.
        copy_bandwidth: Bytes/s read and written in a rank's memory; 0 leaves copies out of predictions.
        intra_bandwidth: Bytes/s that one rank sends to the others of its node.
        intra_latency: Seconds that each such exchange takes at least.
        inter_per_rank: Bytes/s that one rank sends to other nodes while all ranks do.
        inter_latency: Seconds, likewise.
        host_seconds: By strategy, the least time of one layer's forward and backward, which is the host's; under
            ``fsdp2`` that of a layer that is left to FSDP2.
        spill_seconds: What spilling takes beyond its bytes, or replicas of experts that have an owner, forward and
            backward of one layer: the host's part in it.
        memory_bytes: A device's memory, or 0 where that is not known.
        assumed: Fields that were not measured.
        measured: Points behind the figures, ``(bytes or rows, seconds)`` by name; for the reader, not for predictions.

    Raises:
        ValueError: A field is none such; names it.
    """

    device: str
    flops: float
    gemm_tokens: tuple[int, ...]
    gemm_efficiency: tuple[float, ...]
    copy_bandwidth: float
    intra_bandwidth: float
    intra_latency: float
    inter_per_rank: float
    inter_latency: float
    host_seconds: dict[str, float]
    spill_seconds: float = SPILL_SECONDS
    memory_bytes: int = 0
    assumed: tuple[str, ...] = ()
    measured: dict[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not 0 < len(self.device) <= 200:
            raise ValueError("device must be a name of up to 200 characters")
        _names("assumed", self.assumed, {each.name for each in dataclasses.fields(self)})
        _mapping("host_seconds", self.host_seconds)
        _names("host_seconds", list(self.host_seconds), {*STRATEGIES, FSDP2})
        for name, value in self.host_seconds.items():
            if _number(f"host_seconds of {name}", value) < 0:
                raise ValueError(f"host_seconds of {name} must not be negative, got {value}")
        if isinstance(self.memory_bytes, float) or _number("memory_bytes", self.memory_bytes) < 0:
            raise ValueError(f"memory_bytes must be a whole number of at least 0, got {str(self.memory_bytes)[:40]}")
        _mapping("measured", self.measured)
        for name, points in self.measured.items():
            _points(f"measured.{name[:80]}", points)
        if _number("inter_per_rank", self.inter_per_rank) <= 0:
            raise ValueError(f"inter_per_rank must be positive, got {self.inter_per_rank}")
        for name in ("gemm_tokens", "gemm_efficiency"):
            if not isinstance(getattr(self, name), tuple) or not 0 < len(getattr(self, name)) <= LONGEST:
                raise ValueError(f"{name} must be a list of numbers")
        if any(isinstance(tokens, float) for tokens in self.gemm_tokens):
            raise ValueError("gemm_tokens must be whole numbers")
        self.topology(1, 1)

    def topology(self, nodes: int, ranks_per_node: int) -> Topology:
        """A cluster of such ranks."""
        return self.of_ranks(nodes * ranks_per_node, ranks_per_node)

    def of_ranks(self, ranks: int, ranks_per_node: int) -> Topology:
        """Ranks of such a kind; the last node may have fewer than the others.

        Raises:
            ValueError: A figure is impossible; names it.
        """
        width = min(ranks, ranks_per_node)
        return Topology(
            ranks,
            width,
            flops=self.flops,
            intra_bandwidth=self.intra_bandwidth,
            inter_bandwidth=self.inter_per_rank * width,
            intra_latency=self.intra_latency,
            inter_latency=self.inter_latency,
            gemm_tokens=self.gemm_tokens,
            gemm_efficiency=self.gemm_efficiency,
            copy_bandwidth=self.copy_bandwidth,
            spill_seconds=self.spill_seconds,
        )

    def host(self, strategy: str) -> float:
        """The host's time of a layer, forward and backward: seconds."""
        if strategy == FSDP2 and FSDP2 not in self.host_seconds and self.host_seconds:
            # A profile from before it was measured: the same part of the least of ours as is shipped.
            return min(self.host_seconds.values()) * HOST_SECONDS[FSDP2] / HOST_SECONDS["ep"]
        return self.host_seconds.get(strategy, max(self.host_seconds.values(), default=0.0))

    def to_dict(self) -> dict[str, Any]:
        """All fields in JSON's types."""
        return {"format": FORMAT, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Builds a profile from what a file held.

        Raises:
            ValueError: It is none; names the field.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"it is no object whose format is {FORMAT!r}")
        known = {each.name: each for each in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name != "format"}
        if unknown := sorted(map(str, set(given) - set(known))):
            raise ValueError(f"unknown fields {', '.join(unknown)[:200]}; known: {', '.join(known)}")
        needed = [name for name in known if name not in ("spill_seconds", "memory_bytes", "assumed", "measured")]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name in ("gemm_tokens", "gemm_efficiency", "assumed"):
            if not isinstance(given.get(name, []), list):
                raise ValueError(f"{name} must be a list")
            given[name] = tuple(given.get(name, ()))
        measured = given.get("measured", {})
        _mapping("measured", measured)
        given["measured"] = {name: _points(f"measured.{name[:80]}", points) for name, points in measured.items()}
        return cls(**given)

    def write(self, path: str | Path) -> None:
        """Writes JSON, aside first, then renamed."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        aside.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        aside.replace(path)

    def digest(self) -> str:
        """A hash of all that predictions use."""
        used = {name: value for name, value in self.to_dict().items() if name not in ("measured", "assumed")}
        return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()


def read_profile(path: str | Path) -> Profile:
    """A profile that :meth:`Profile.write` wrote.

    Raises:
        ValueError: It is cut, too large, or a field is of a wrong kind; names the file and the field.
        OSError: The file cannot be opened.
    """
    try:
        return Profile.from_dict(_json(path))
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is not a profile: {error or type(error).__name__}") from error


def read_machine(path: str | Path, nodes: int, ranks_per_node: int) -> Topology:
    """A cluster by a file: a profile, or the fields of a :class:`Topology`.

    Raises:
        ValueError: It is neither; names the file and the field.
        OSError: The file cannot be opened.
    """
    try:
        is_profile = "format" in _json(path)
    except (ValueError, TypeError, RecursionError):
        is_profile = False
    if is_profile:
        return read_profile(path).topology(nodes, ranks_per_node)
    return dataclasses.replace(read_topology(path), num_ranks=nodes * ranks_per_node, ranks_per_node=ranks_per_node)


def shipped_profile(device: str) -> Profile:
    """The profile that comes with hf_laer for a device of that name.

    H200, H100 and A100 have their own; another GPU is taken for an A100, and ``cpu`` for a slow one under gloo.
    """
    if device == "cpu":
        return _shipped_cpu()
    name = next((name for name in PROFILES if name in device.lower()), "a100")
    figures = PROFILES[name]
    machine = Topology(1, 1)
    return Profile(
        device=device,
        flops=figures["flops"],
        gemm_tokens=GEMM_TOKENS,
        gemm_efficiency=GEMM_EFFICIENCY,
        copy_bandwidth=_COPIES[name],
        intra_bandwidth=figures["intra_bandwidth"],
        intra_latency=machine.intra_latency,
        inter_per_rank=figures["inter_per_rank"],
        inter_latency=machine.inter_latency,
        host_seconds=dict(HOST_SECONDS),
        assumed=("flops", "gemm_tokens", "gemm_efficiency", "copy_bandwidth", *_LINKS, "host_seconds", "spill_seconds"),
    )


_LINKS = ("intra_bandwidth", "intra_latency", "inter_per_rank", "inter_latency")


def _shipped_cpu() -> Profile:
    tokens, reached = _CPU_CURVE
    return Profile(
        device="cpu",
        gemm_tokens=tokens,
        gemm_efficiency=reached,
        intra_latency=_CPU_LATENCY,
        inter_latency=_CPU_LATENCY,
        host_seconds=dict(_CPU_HOST_SECONDS),
        spill_seconds=0.0,
        assumed=(
            *_CPU,
            "gemm_tokens",
            "gemm_efficiency",
            "intra_latency",
            "inter_latency",
            "host_seconds",
            "spill_seconds",
        ),
        flops=_CPU["flops"],
        copy_bandwidth=_CPU["copy_bandwidth"],
        intra_bandwidth=_CPU["intra_bandwidth"],
        inter_per_rank=_CPU["inter_per_rank"],
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth behind measured transfers: ``seconds = latency + bytes / bandwidth``.

    The line with the least sum of squared relative errors; its latency is at least 0.

    Args:
        points: ``(bytes, seconds)``, at least one.

    Raises:
        ValueError: There is no point, or one is not positive.
    """
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError(f"a line through {list(points)[:4]} needs positive bytes and seconds")
    size, seconds = np.array(points, np.float64).T
    # Divided by the seconds, so that errors are relative: 1 = latency / seconds + bytes / (bandwidth * seconds).
    (latency, per_byte), *_ = np.linalg.lstsq(
        np.stack([1 / seconds, size / seconds], 1), np.ones(len(size)), rcond=None
    )
    if len(size) == 1 or latency < 0 or per_byte <= 0:
        ratio = size / seconds
        return 0.0, float((ratio @ ratio) / ratio.sum())
    return float(latency), float(1 / per_byte)


def _json(path: str | Path) -> Any:
    size = Path(path).stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"{size} bytes are too many")
    return json.loads(Path(path).read_bytes().decode("utf-8"))


def _number(name: str, value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -LARGEST_NUMBER < value < LARGEST_NUMBER:  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number below 2**62, got {str(value)[:40]!r}")
    return float(value)  # type: ignore[arg-type]


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, dict) or len(value) > LONGEST:
        raise ValueError(f"{name} must be an object, got {type(value).__name__}")


def _names(name: str, values: Sequence[object], known: set[str]) -> None:
    wrong = [value for value in values if not isinstance(value, str) or value not in known]
    if wrong:
        raise ValueError(f"{name} holds {str(wrong[0])[:40]!r}, which is not one of {', '.join(sorted(known))}")


def _points(name: str, points: Any) -> Curve:
    if not isinstance(points, list | tuple) or len(points) > LONGEST:
        raise ValueError(f"{name} must be a list of pairs")
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise ValueError(f"{name} must be a list of pairs")
        for value in point:
            _number(name, value)
    return tuple((point[0], point[1]) for point in points)
