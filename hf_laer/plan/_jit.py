"""How hot loops are compiled: without the GIL, cached on disk, integers as written (no fastmath)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def _sources() -> str:
    """A hash of every file of this package."""
    sha = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()


_STAMP = _sources()


def kernel(function: F) -> F:
    """Compiles ``function`` at its first call; a node's first process compiles, later ones load the cache.

    Numba's cache notices a change in a kernel's own file, but not in a kernel of another file that it calls: a rank
    with a stale cache would make other plans than its peers. So the cache is bound to all files of the package.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(F, numba.njit(nogil=True)(function))
    stored = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if stored is not None and hasattr(stored, "_source_stamp"):
        stored._source_stamp = _STAMP
        return cast(F, compiled)
    # Another Numba keeps its stamp elsewhere: better no cache than a stale one.
    return cast(F, numba.njit(nogil=True)(function))
