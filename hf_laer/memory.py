"""What a checkpoint remembers of the engine, checked before any of it is taken over.

A memory is JSON: per layer ``{"step": int, "held": [N, E] of 0 and 1, "tuner": null or {"seen": int, "history":
[[G, E], ...], "misses": {forecast: int}, "placements": [[N, S], ...]}}``, for G token groups. One of another number of
ranks or slots is whole, and passed over where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_laer.plan.forecast import FORECASTS
from hf_laer.plan.types import Placement
from hf_laer.plan.validate import check_loads, check_placement

LARGEST = 2**62


def check_memory(memory: Any, experts: Mapping[str, int]) -> dict[str, Any]:
    """The memory of the layers that the model has.

    Args:
        memory: What a file held.
        experts: E of each of the model's layers.

    Raises:
        ValueError: It is cut, of another model, or no such memory; names layer and field.
    """
    if not isinstance(memory, dict):
        raise ValueError(f"the engine's memory must be an object, got {type(memory).__name__}")
    known = {name: remembered for name, remembered in memory.items() if name in experts}
    for name, remembered in known.items():
        try:
            _check_layer(remembered, experts[name])
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"the engine's memory of {name}: {error}") from error
    return known


def _check_layer(remembered: Any, experts: int) -> None:
    step, held, tuner = _fields(remembered, "step", "held", "tuner")
    _count("step", step)
    table = _table("held", held, experts)
    if table.max() > 1:
        raise ValueError(f"held must be 0 or 1, got {table.max()}")
    if tuner is None:
        return
    seen, history, misses, placements = _fields(tuner, "seen", "history", "misses", "placements")
    _count("seen", seen)
    for name, value in zip(FORECASTS, _fields(misses, *FORECASTS), strict=True):
        _count(f"misses of {name}", value)
    for name, tables in (("history", history), ("placements", placements)):
        if not isinstance(tables, list):
            raise ValueError(f"{name} must be a list, got {type(tables).__name__}")
    for loads in history:
        if len(_table("history", loads, experts)) != len(placements):
            raise ValueError(f"history is of {len(loads)} token groups, placements of {len(placements)}")
    ranks = 0
    for slots in placements:
        made = np.array(slots)
        if made.dtype.kind != "i" or made.ndim != 2:
            raise ValueError(f"placements must hold tables of experts, got {made.dtype} of shape {made.shape}")
        ranks += len(check_placement(Placement(made), len(made), experts))
        missing = sorted(set(range(experts)) - set(made.flat))
        if missing:
            raise ValueError(f"expert {missing[0]} is in no slot of a token group's placement")
    if ranks != len(table):
        raise ValueError(f"placements are of {ranks} ranks, held of {len(table)}")


def _fields(values: Any, *names: str) -> list[Any]:
    if not isinstance(values, dict) or any(name not in values for name in names):
        found = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"it needs {', '.join(names)}, got {str(found)[:200]}")
    return [values[name] for name in names]


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
        raise ValueError(f"{name} must be a whole number of at least 0, got {str(value)[:40]!r}")


def _table(name: str, rows: Any, experts: int) -> np.ndarray:
    """int64 ``[N, E]`` without negative values."""
    try:
        table = check_loads(np.array(rows))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if table.shape[1] != experts:
        raise ValueError(f"{name} is of {table.shape[1]} experts, the layer has {experts}")
    return table
