"""Sorting inside kernels. Written out because Numba takes seconds to compile NumPy's sorts, once per kernel."""

from __future__ import annotations

import numpy as np

from ._jit import kernel


@kernel
def descending(values: np.ndarray) -> np.ndarray:
    """int64: the positions of ``values``, largest first, equal ones in their order (a merge sort)."""
    size = len(values)
    order, spare = np.empty(size, np.int64), np.empty(size, np.int64)
    for at in range(size):
        order[at] = at
    width = 1
    while width < size:
        for low in range(0, size, 2 * width):
            middle, high = min(low + width, size), min(low + 2 * width, size)
            left, right = low, middle
            for at in range(low, high):
                if left < middle and (right == high or values[order[left]] >= values[order[right]]):
                    spare[at] = order[left]
                    left += 1
                else:
                    spare[at] = order[right]
                    right += 1
        order, spare = spare, order
        width *= 2
    return order
