"""A routing trace: tokens per step, layer, rank and expert, in one ``.npz`` file that loads without pickle.

The file holds ``loads``, an integer array ``[steps, layers, N, E]``, and ``meta``, a JSON object in a string
array of one element. Known keys: ``model``, ``hidden``, ``intermediate``, ``top_k``, ``slots``, ``ranks_per_node``;
others are kept.
"""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from hf_laer.plan.validate import check_loads

COLUMNS = ("step", "layer", "rank", "expert", "tokens")
COUNTS = ("hidden", "intermediate", "top_k", "ranks_per_node", "slots")
# A file may claim any size; 4 GiB of int64 is far beyond every trace that this package writes.
LARGEST_ENTRIES = 2**29
LARGEST_META = 2**20


@dataclass(frozen=True, eq=False)
class Trace:
    """Loads over steps and layers.

    Args:
        loads: int64 ``[steps, layers, N, E]``.
        meta: What is known of the model and the machine; values are JSON.

    Raises:
        ValueError: Not four axes, an empty one, a value that is no token count, or a size in ``meta`` that is none.
    """

    loads: np.ndarray
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loads = np.asarray(self.loads)
        if loads.ndim != 4 or 0 in loads.shape:
            raise ValueError(f"a trace is [steps, layers, ranks, experts], got shape {loads.shape}")
        flat = check_loads(loads.reshape(-1, loads.shape[-1]))
        object.__setattr__(self, "loads", flat.reshape(loads.shape))
        _check_meta(self.meta)

    @property
    def steps(self) -> int:
        return int(self.loads.shape[0])

    @property
    def layers(self) -> int:
        return int(self.loads.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.loads.shape[2])

    @property
    def experts(self) -> int:
        return int(self.loads.shape[3])

    def layer(self, layer: int, ranks: int | None = None) -> np.ndarray:
        """One layer's loads, int64 ``[steps, ranks, E]``, re-grouped to ``ranks`` ranks.

        With more ranks than were recorded, rank ``r`` gets the batch of recorded rank ``r % N`` from
        ``r // N`` steps later (around the end), so that every rank has real routing of its own; with fewer,
        the first ones stay.
        """
        loads = self.loads[:, layer]
        if ranks is None or ranks == self.ranks:
            return np.ascontiguousarray(loads)
        rank = np.arange(ranks)
        step = (np.arange(self.steps)[:, None] + rank[None, :] // self.ranks) % self.steps
        return np.ascontiguousarray(loads[step, rank[None, :] % self.ranks])

    def save(self, path: str | Path) -> None:
        """Writes the file, compressed, aside first, then renamed."""
        _write(path, self.loads, self.meta)


def _write(path: str | Path, loads: np.ndarray, meta: Mapping[str, Any]) -> None:
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as out:
        np.savez_compressed(out, loads=_small(loads), meta=np.array([json.dumps(dict(meta))]))
    aside.replace(path)


def _small(loads: np.ndarray) -> np.ndarray:
    """As int32 where that holds the counts."""
    return loads.astype(np.int32, copy=False) if loads.max() < 2**31 else loads


def load_trace(path: str | Path) -> Trace:
    """Reads a trace: ``.csv`` by :func:`trace_from_csv`, everything else as ``.npz``; no pickle is ever read.

    Raises:
        ValueError: Not such a file, or a larger one than ``LARGEST_ENTRIES``; the message says what is wrong.
        OSError: The file cannot be opened.
    """
    if Path(path).suffix.lower() == ".csv":
        return trace_from_csv(path)
    with open(path, "rb") as file:
        try:
            return _from_npz(file)
        except Exception as error:  # the readers of zip, deflate and npy trip over cut files in a dozen ways
            raise ValueError(f"{path} is not a trace: {error or type(error).__name__}") from error


def _from_npz(file: IO[bytes]) -> Trace:
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        if "loads.npy" not in names:
            raise ValueError(f"it lacks loads, and has {', '.join(sorted(names)) or 'nothing'}")
        loads = _array(archive, "loads", LARGEST_ENTRIES)
        if "meta.npy" not in names:
            return Trace(loads)
        text = _array(archive, "meta", 1)
        if text.dtype.kind != "U" or text.size != 1:
            raise ValueError(f"meta must be one string, got {text.dtype} of shape {text.shape}")
        return Trace(loads, json.loads(str(text.reshape(-1)[0])))


def _array(archive: zipfile.ZipFile, name: str, largest: int) -> np.ndarray:
    """An array of the archive. Its header is compared with the bytes behind it before any memory is taken."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed otherwise than NumPy does")
    with archive.open(info) as member:
        # Newer versions have longer headers, which NumPy reads whole before it looks at them.
        if np.lib.format.read_magic(member) != (1, 0):
            raise ValueError(f"{name} is not of npy version 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        size, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
    room = LARGEST_META if dtype.kind == "U" else 8 * largest
    if math.prod(shape) > largest or size > room:
        raise ValueError(f"{name} claims shape {shape} of {dtype}, {size} bytes: more than {room} are not read")
    if size != there:
        raise ValueError(f"{name} claims shape {shape} of {dtype}, {size} bytes, and has {there}")
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _check_meta(meta: Any) -> None:
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta must be an object, got {type(meta).__name__}")
    for name in COUNTS:
        value = meta.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < 2**31:
            raise ValueError(f"meta: {name} must be a whole number of at least 1, got {str(value)[:40]}")


def trace_from_csv(path: str | Path, meta: Mapping[str, Any] | None = None) -> Trace:
    """Reads a plain table with the columns step, layer, rank, expert and tokens; missing rows are 0.

    ``layer`` and ``rank`` may be missing too and are then 0. Rows of the same place add up.

    Raises:
        ValueError: No such columns, a value that is no whole number of at least 0 (names the line), or a table
            that would need more than ``LARGEST_ENTRIES``.
        OSError: The file cannot be opened.
    """
    with open(path, newline="", encoding="utf-8") as lines:
        try:
            rows = list(_rows(csv.reader(lines)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a table: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}, {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    table = np.array(rows, np.int64)
    shape = tuple(int(size) + 1 for size in table[:, :4].max(axis=0))
    if math.prod(shape) > LARGEST_ENTRIES:
        raise ValueError(f"{path} needs [steps, layers, ranks, experts] = {shape}: over {LARGEST_ENTRIES} entries")
    if sum(row[4] for row in rows) >= 2**62:
        raise ValueError(f"{path}: the tokens add up to 2**62 or more")
    loads = np.zeros(shape, np.int64)
    np.add.at(loads, tuple(table[:, :4].T), table[:, 4])
    return Trace(loads, meta or {})


def _rows(reader: Any) -> Iterator[tuple[int, ...]]:
    """Each line's values in the order of ``COLUMNS``. Errors name the line."""
    names = [name.strip() for name in next(reader, [])]
    missing = {"step", "expert", "tokens"} - set(names)
    if missing or len(set(names)) < len(names):
        wrong = f"it lacks the columns {', '.join(sorted(missing))}" if missing else "a column comes twice"
        raise ValueError(f"line 1: {wrong}; it has {', '.join(names)[:200]}")
    places = [(name, names.index(name) if name in names else None) for name in COLUMNS]
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            raise ValueError(f"line {reader.line_num}: {len(row)} values in {len(names)} columns")
        yield tuple(0 if at is None else _count(row[at], name, reader.line_num) for name, at in places)


def _count(text: str, name: str, line: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**62:
        raise ValueError(f"line {line}: {name} must be a whole number of at least 0, got {text[:40]!r}")
    return value


class TraceWriter:
    """Gathers loads while a model trains, and makes a :class:`Trace` of the steps that are complete.

    Args:
        layers: Number of MoE layers.
        meta: What the trace is to say of the model and the machine; may be changed until it is written.
        max_bytes: Host memory for the loads; the oldest steps fall out, so that a long run's memory stays flat.

    Attributes:
        dropped: Steps that fell out.
    """

    def __init__(self, layers: int, meta: Mapping[str, Any] | None = None, max_bytes: int = 2**28) -> None:
        if layers < 1 or max_bytes < 1:
            raise ValueError(f"layers={layers} and max_bytes={max_bytes} must be at least 1")
        self.meta = dict(meta or {})
        self.dropped = 0
        self._layers, self._max_bytes, self._bytes = layers, max_bytes, 0
        self._steps: deque[dict[int, np.ndarray]] = deque()

    def add(self, layer: int, loads: np.ndarray) -> None:
        """Adds one layer's ``[N, E]`` of one micro-batch; a layer that comes again opens the next step.

        Raises:
            ValueError: No such layer, or loads that are no token counts.
        """
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer {layer} is not in 0..{self._layers - 1}")
        if not self._steps or layer in self._steps[-1]:
            self._steps.append({})
        kept = self._steps[-1][layer] = _small(np.array(check_loads(loads)))
        self._bytes += kept.nbytes
        while self._bytes > self._max_bytes and len(self._steps) > 1:
            self._bytes -= sum(old.nbytes for old in self._steps.popleft().values())
            self.dropped += 1

    @property
    def steps(self) -> int:
        """Complete steps at hand."""
        return len(self._whole())

    def trace(self) -> Trace:
        """What was gathered; a step in which a layer is missing is left out.

        Raises:
            ValueError: No step is complete.
        """
        return Trace(self._loads(), self._said())

    def save(self, path: str | Path) -> None:
        """Writes :meth:`trace`, aside first, then renamed, in little more memory than the loads take.

        Raises:
            ValueError: No step is complete.
        """
        _write(path, self._loads(), self._said())

    def _whole(self) -> list[dict[int, np.ndarray]]:
        return [step for step in self._steps if len(step) == self._layers]

    def _loads(self) -> np.ndarray:
        whole = self._whole()
        if not whole:
            raise ValueError(f"no step with all {self._layers} layers was recorded")
        return np.stack([np.stack([step[layer] for layer in range(self._layers)]) for step in whole])

    def _said(self) -> dict[str, Any]:
        return {**self.meta, "first_step": self.dropped}
