"""Reads a sharded checkpoint of ``torch.distributed.checkpoint`` without ranks, and without trusting it.

Its index is a pickle. Here only the classes that describe tensors come out of it, and what they claim is compared with
the files before any memory is taken.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
}


class SavedTensors:
    """The tensors of one sharded checkpoint.

    Args:
        folder: Holds ``.metadata`` and the shards.

    Raises:
        ValueError: There is no such index, it is cut or holds other things than tensors and plain data, or shards are
            missing or cut; names the files.
        OSError: A file cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metadata = read_index(self.folder / INDEX)
        try:
            found = self._metadata.state_dict_metadata.items()
            self.tensors = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
            _check_shards(self.folder, self.tensors, self._metadata.storage_data)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{self.folder / INDEX} describes no tensors: {error}") from error

    def load(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Reads some tensors in full, on the CPU.

        Args:
            names: The wanted name of each, and the stored one.

        Raises:
            ValueError: A shard does not hold what the index says.
        """
        state: dict[str, Any] = {}
        for stored in names.values():
            entry = self.tensors[stored]
            state[stored] = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there are no ranks is known
                dcp.load(state, storage_reader=_Reader(self.folder, self._metadata), no_dist=True)
        except (Exception, CheckpointException) as error:  # DCP wraps what its reader met, in no Exception
            raise ValueError(f"the shards in {self.folder} cannot be read: {_last_line(error)}") from error
        return {name: state[stored] for name, stored in names.items()}


class _Reader(FileSystemReader):
    """Reads shards by an index that was read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"it wants {module}.{name}, which no index of tensors needs")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration: early releases of Python 3.11 pickle it as ``getattr`` of its class."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str)):
        raise ValueError("it wants attributes, which no index of tensors needs")
    return kind[name]


def read_index(path: Path) -> Metadata:
    """A checkpoint's ``.metadata``, of which nothing is run.

    Raises:
        ValueError: It is none; names the file.
        OSError: It cannot be read.
    """
    # Read whole first: a reader of the file itself would take what memory the pickle claims to need.
    content = io.BytesIO(path.read_bytes())
    try:
        metadata = _Unpickler(content).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{path} is no index of a sharded checkpoint: {error or type(error).__name__}") from error
    return metadata


def _check_shards(folder: Path, tensors: Mapping[str, TensorStorageMetadata], stored: Any) -> None:
    """Every shard is there and long enough, and the chunks of every tensor fill it."""
    needed: dict[str, int] = {}
    places: dict[str, set[tuple[int, ...]]] = {}
    for index, info in stored.items():
        if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
            raise ValueError(f"{folder / INDEX} points to {str(info.relative_path)[:80]!r}, outside of its folder")
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        places.setdefault(index.fqn, set()).add(tuple(index.offset or ()))
    gone = sorted(name for name in needed if not (folder / name).is_file())
    if gone:
        raise ValueError(f"{folder} lacks {len(gone)} of {len(needed)} shards: {', '.join(gone)[:400]}")
    cut = sorted(name for name, size in needed.items() if (folder / name).stat().st_size < size)
    if cut:
        raise ValueError(f"shards in {folder} are cut: {', '.join(cut)[:400]}")
    for name, entry in tensors.items():
        filled = {tuple(chunk.offsets): math.prod(chunk.sizes) for chunk in entry.chunks}
        there = sum(size for offsets, size in filled.items() if offsets in places.get(name, ()))
        if there != math.prod(entry.size):
            raise ValueError(f"{folder} holds {there} of the {math.prod(entry.size)} values of {name}")


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:400]
