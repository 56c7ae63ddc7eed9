"""The machine on paper: nodes of ranks, their links, and how fast one rank multiplies matrices.

The efficiency curve and the H200 figures were measured on one host (``torch`` grouped products in bf16, NCCL
all-to-all of 256 MB and more, see ``docs/planners.md``); the others scale data-sheet figures by the same
ratios.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

# Fraction of `flops` that a group of so many tokens reaches; below 16 tokens it falls in proportion.
# Means over four expert shapes (2880 x 2880, 2048 x 768, 4096 x 14336, 7168 x 2048; 4 to 64 groups of equal size).
GEMM_TOKENS = (16, 32, 64, 128, 256, 512, 2048)
GEMM_EFFICIENCY = (0.054, 0.109, 0.23, 0.51, 0.81, 0.84, 0.84)


@dataclass(frozen=True)
class Topology:
    """Ranks, nodes, links and compute rate.

    Args:
        num_ranks: N.
        ranks_per_node: Consecutive ranks that share a node; the last node may have fewer.
        flops: FLOP/s that a large bf16 product reaches on one rank.
        intra_bandwidth: Bytes/s that one rank sends (and receives) inside its node.
        inter_bandwidth: Bytes/s that one node sends (and receives), shared by its ranks.
        intra_latency: Seconds per exchange inside a node.
        inter_latency: Seconds per exchange between nodes.
        gemm_tokens: Ascending group sizes at which the efficiency was measured.
        gemm_efficiency: The fraction of ``flops`` reached at each, in (0, 1].
        copy_bandwidth: Bytes/s read and written where one rank moves values about in its memory; 0 leaves the time of
            that out of predictions.
        spill_seconds: What a layer's forward and backward take longer where weights travel that nobody foresaw, or any
            while experts have an owner, however few: the host's part in it. 0 leaves it out.

    Raises:
        ValueError: A figure is not positive, or the curve is not one.
    """

    num_ranks: int
    ranks_per_node: int
    flops: float = 794e12
    intra_bandwidth: float = 290e9
    inter_bandwidth: float = 360e9
    intra_latency: float = 20e-6
    inter_latency: float = 50e-6
    gemm_tokens: tuple[int, ...] = GEMM_TOKENS
    gemm_efficiency: tuple[float, ...] = GEMM_EFFICIENCY
    copy_bandwidth: float = 0.0
    spill_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ValueError(f"{name} must be a whole number, got {str(getattr(self, name))[:40]!r}")
        for name in ("num_ranks", "ranks_per_node", "flops", "intra_bandwidth", "inter_bandwidth"):
            if not _number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("intra_latency", "inter_latency", "copy_bandwidth", "spill_seconds"):
            if _number(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        tokens = [_number("gemm_tokens", value) for value in self.gemm_tokens]
        reached = [_number("gemm_efficiency", value) for value in self.gemm_efficiency]
        if len(tokens) != len(reached) or not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ValueError(f"gemm_tokens {tokens} must ascend and pair with gemm_efficiency {reached}")
        if min(reached) <= 0 or max(reached) > 1:
            raise ValueError(f"gemm_efficiency {reached} must lie in (0, 1]")

    @property
    def width(self) -> int:
        """Ranks of a full node."""
        return min(self.ranks_per_node, self.num_ranks)

    @property
    def nodes(self) -> int:
        return -(-self.num_ranks // self.width)

    @property
    def latency(self) -> float:
        """Seconds that an exchange takes at least."""
        return self.inter_latency if self.nodes > 1 else self.intra_latency

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The efficiency curve as int64 and float64 arrays."""
        return self._curve

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.gemm_tokens, np.int64), np.array(self.gemm_efficiency, np.float64)


def _number(name: str, value: object) -> float:
    """The value, once it is known to be one that float64 and int64 arithmetic can hold."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not -(2.0**62) < value < 2.0**62:  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number below 2**62, got {str(value)[:40]!r}")
    return float(value)  # type: ignore[arg-type]


# 400 Gb/s per GPU for the H parts, 800 Gb/s per node of eight for the A100 (LAER's cluster), nine tenths of
# each usable.
PROFILES: dict[str, dict[str, float]] = {
    "h200": {"flops": 794e12, "intra_bandwidth": 290e9, "inter_per_rank": 45e9},
    "h100": {"flops": 740e12, "intra_bandwidth": 290e9, "inter_per_rank": 45e9},
    "a100": {"flops": 250e12, "intra_bandwidth": 190e9, "inter_per_rank": 11.25e9},
}


def topology(name: str, nodes: int, ranks_per_node: int, **overrides: Any) -> Topology:
    """A :class:`Topology` of ``nodes`` like nodes from the profile ``name`` (``h200``, ``h100``, ``a100``).

    Raises:
        ValueError: Unknown profile, or an impossible size.
    """
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}; there are {', '.join(PROFILES)}")
    profile = dict(PROFILES[name])
    inter = profile.pop("inter_per_rank") * ranks_per_node
    return Topology(nodes * ranks_per_node, ranks_per_node, **{"inter_bandwidth": inter, **profile, **overrides})


def read_topology(path: str | Path) -> Topology:
    """A measured profile: a JSON object with the fields of :class:`Topology`.

    Raises:
        ValueError: Not such an object; names the file and the field.
        OSError: The file cannot be opened.
    """
    known = {field.name for field in dataclasses.fields(Topology)}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)[:200]}; known: {', '.join(sorted(known))}")
        for name in ("gemm_tokens", "gemm_efficiency"):
            if not isinstance(values.get(name, []), list):
                raise ValueError(f"{name} must be a list")
            if name in values:
                values[name] = tuple(values[name])
        return Topology(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a topology: {error}") from error
