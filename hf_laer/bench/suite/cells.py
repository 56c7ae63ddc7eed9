"""Cells of a suite: each measured once, kept in a folder, and not measured again at the next start."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GIB = 2**30
# A cell that took the process down with it so often is not begun again.
ATTEMPTS = 2
_RUN, _SKIP, _LATE = range(3)


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Args:
        part: Of the suite.
        name: Unique in its part.
        run: Measures it; collective over the world.
        about: What it is, for tables.
        need: GiB that it takes on the fullest GPU, as far as that is known beforehand.
    """

    part: str
    name: str
    run: Callable[[], list[dict[str, Any]]]
    about: dict[str, Any] = field(default_factory=dict)
    need: float = 0.0


@dataclass(frozen=True)
class Kept:
    """What is known of a cell.

    Args:
        part: The cell's.
        name: The cell's.
        about: The cell's.
        rows: What was measured.
        skipped: Why nothing was, else empty.
    """

    part: str
    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    skipped: str = ""


class Folder:
    """Where cells are kept: one JSON file each, written aside, then renamed. Only the first rank reads and writes.

    Args:
        path: The folder; it is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, configuration: dict[str, Any]) -> None:
        """Notes what the cells were measured with, or compares it.

        Raises:
            ValueError: The folder's cells were measured with something else.
        """
        file = self.path / "configuration.json"
        if not file.exists():
            _write(file, configuration)
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        keys = sorted(set(before) | set(configuration))
        other = [
            f"{k} {before.get(k)!r}, now {configuration.get(k)!r}"
            for k in keys
            if before.get(k) != configuration.get(k)
        ]
        if other:
            raise ValueError(f"{self.path} holds cells measured with {'; '.join(other)}: choose another --out")

    def find(self, cell: Cell) -> Kept | None:
        """What is known of a cell."""
        file = self._file(cell, ".json")
        return Kept(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def keep(self, cell: Cell, rows: Sequence[dict[str, Any]] = (), skipped: str = "") -> None:
        """Notes what came of a cell."""
        _write(self._file(cell, ".json"), vars(Kept(cell.part, cell.name, cell.about, list(rows), skipped)))
        self._file(cell, ".begun").unlink(missing_ok=True)

    def begin(self, cell: Cell) -> int:
        """Notes that a cell begins; how often it had begun before without an end."""
        file = self._file(cell, ".begun")
        before = int(file.read_text()) if file.exists() else 0
        _write(file, before + 1)
        return before

    def _file(self, cell: Cell, suffix: str) -> Path:
        return self.path / "cells" / f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', f'{cell.part} {cell.name}')}{suffix}"


def _write(file: Path, what: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(json.dumps(what, indent=1), encoding="utf-8")
    aside.replace(file)


def run_cells(
    cells: Sequence[Cell],
    folder: Folder,
    minutes: float,
    room: float,
    device: torch.device,
    say: Callable[[str], None],
) -> list[Cell]:
    """Measures the cells of one part that are not kept yet, as far as the time goes. Collective over the world.

    A cell that needs more than ``room`` GiB, or whose contenders refuse it, is noted with the reason. One that fails is
    noted too, and its error raised: ranks may stand apart then, so the suite must be started again.

    Args:
        cells: In the order of their importance.
        folder: Where they are kept.
        minutes: No cell begins later than that.
        room: GiB of a GPU.
        device: This rank's.
        say: Told of progress, on the first rank.

    Returns:
        Those that there was no time for.
    """
    end, first = time.monotonic() + 60 * minutes, dist.get_rank() == 0
    for at, cell in enumerate(cells):
        verdict = _verdict(cell, folder, end, room, say) if first else _SKIP
        verdict = _of_first(verdict, device)
        if verdict == _LATE:
            return [later for later in cells[at:] if not first or folder.find(later) is None]
        if verdict == _RUN:
            _run(cell, folder, say if first else None)
    return []


def _verdict(cell: Cell, folder: Folder, end: float, room: float, say: Callable[[str], None]) -> int:
    if folder.find(cell) is not None:
        return _SKIP
    reason = ""
    if cell.need > room:
        reason = f"needs about {cell.need:.0f} GiB per GPU, of {room:.0f}"
    elif time.monotonic() >= end:
        return _LATE
    elif folder.begin(cell) >= ATTEMPTS:
        reason = f"ended the process {ATTEMPTS} times"
    if reason:
        folder.keep(cell, skipped=reason)
        say(f"{cell.part}, {cell.name}: left out, {reason}")
        return _SKIP
    return _RUN


def _of_first(verdict: int, device: torch.device) -> int:
    told = torch.tensor(verdict, device=device)
    dist.broadcast(told, src=0)
    return int(told.item())


def _run(cell: Cell, folder: Folder, say: Callable[[str], None] | None) -> None:
    begun = time.monotonic()
    try:
        rows = cell.run()
    except ValueError as error:
        # What cannot be measured is refused by all ranks alike, before anything travels.
        if say is not None:
            folder.keep(cell, skipped=str(error))
            say(f"{cell.part}, {cell.name}: left out, {error}")
    except Exception as error:
        # The first rank waits for the others, or says what became of that; memory runs out on one rank by itself.
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        if (memory or say is not None) and folder.find(cell) is None:
            said = next(iter(str(error).splitlines()), "")[:200]
            folder.keep(cell, skipped=f"failed on rank {dist.get_rank()}: {type(error).__name__}: {said}")
        raise
    else:
        if say is not None:
            folder.keep(cell, rows)
            say(f"{cell.part}, {cell.name}: {time.monotonic() - begun:.1f} s")
