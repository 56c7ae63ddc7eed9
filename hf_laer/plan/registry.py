"""Planners by name. Each entry's docstring says what it does and where it was published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .at_home import llep_at_home
from .eplb import eplb, lplb
from .fixed import ep, fsdp, fsdp_ep
from .llep import llep
from .relocate import flexmoe, smartmoe
from .shadow import fastermoe, prophet
from .shares import laer
from .spill import fsep_llep
from .split import fsep
from .types import Plan

PLANNERS: dict[str, Callable[..., Plan]] = {
    "ep": ep,
    "fsdp": fsdp,
    "fsdp_ep": fsdp_ep,
    "llep": llep,
    "llep+home": llep_at_home,
    "laer": laer,
    "fsep": fsep,
    "fsep+llep": fsep_llep,
    "eplb": eplb,
    "lplb": lplb,
    "fastermoe": fastermoe,
    "smartmoe": smartmoe,
    "flexmoe": flexmoe,
    "prophet": prophet,
}


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
