"""Planners: pure functions from loads to plans. Numpy in, frozen dataclasses out; no torch."""

from .fixed import ep, fsdp
from .laer import initial_placement, laer_placement
from .llep import llep
from .owners import chunk_owners
from .registry import PLANNERS, get_planner, planner_summary
from .split import exact_split, fsep
from .types import EMPTY, Placement, Plan, Split, imbalance
from .warmup import compile_kernels

__all__ = [
    "EMPTY",
    "PLANNERS",
    "Placement",
    "Plan",
    "Split",
    "chunk_owners",
    "compile_kernels",
    "ep",
    "exact_split",
    "fsdp",
    "fsep",
    "get_planner",
    "imbalance",
    "initial_placement",
    "laer_placement",
    "llep",
    "planner_summary",
]
