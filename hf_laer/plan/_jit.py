"""How hot loops are compiled: without the GIL, cached on disk, integers as written (no fastmath)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compiles ``function`` at its first call; the first process of a node compiles, later ones load the
    cache.
    """
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(F, numba.njit(nogil=True)(function))
