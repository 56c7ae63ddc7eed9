"""Planners by name. Each entry's docstring says what it does and where it was published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fixed import ep, fsdp
from .llep import llep
from .split import fsep
from .types import Plan

PLANNERS: dict[str, Callable[..., Plan]] = {"ep": ep, "fsdp": fsdp, "llep": llep, "fsep": fsep}


def get_planner(name: str) -> Callable[..., Plan]:
    """The planner called ``name``.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if name not in PLANNERS:
        raise ValueError(f"no planner {name!r}; there are {', '.join(PLANNERS)}")
    return PLANNERS[name]


def planner_summary() -> dict[str, Any]:
    """The first line of each planner's docstring, by name."""
    return {name: (planner.__doc__ or "").strip().split("\n")[0] for name, planner in PLANNERS.items()}
