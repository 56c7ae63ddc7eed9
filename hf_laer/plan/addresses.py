"""Tables of addresses for the kernels that copy or sum many blocks in one launch: rows of at most so many elements.

No part of planning, but compiled like it: a layer asks for several in a step, while its device waits.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel

# A kernel moves more than one element at a time where a row's numbers are multiples of this.
ALIGNMENT = 16


@kernel
def copy_rows(
    pairs: np.ndarray, into: np.ndarray, out_of: np.ndarray, target_bytes: int, source_bytes: int, longest: int
) -> tuple[np.ndarray, int, int]:
    """Blocks that are to be copied.

    Args:
        pairs: int64 ``[P, 6]``: how many blocks, the elements of each, the target's address and the bytes from one of
            its slices to the next, and the same two of the source.
        into: int64 ``[B]``, the slices of the targets, pair after pair.
        out_of: int64 ``[B]``, those of the sources.
        target_bytes: Of an element.
        source_bytes: Of an element.
        longest: Elements of a row.

    Returns:
        int64 ``[R, 3]``: elements, target and source, the aligned rows first; how many are aligned; and the most
        elements that one has.
    """
    rows, most = 0, 0
    for pair in pairs:
        rows += pair[0] * -(-pair[1] // longest)
        most = max(most, min(pair[1], longest))
    table = np.empty((rows, 3), np.int64)
    aligned, odd, block = 0, rows, 0
    for pair in pairs:
        for _ in range(pair[0]):
            target, source = pair[2] + into[block] * pair[3], pair[4] + out_of[block] * pair[5]
            block += 1
            for done in range(0, pair[1], longest):
                size, here, there = min(pair[1] - done, longest), target + done * target_bytes, done * source_bytes
                there += source
                if (size | here | there) % ALIGNMENT == 0:
                    at = aligned
                    aligned += 1
                else:
                    odd -= 1
                    at = odd
                table[at, 0], table[at, 1], table[at, 2] = size, here, there
    return table, aligned, most


@kernel
def sum_rows(
    into: np.ndarray,
    parts: np.ndarray,
    at: np.ndarray,
    which: np.ndarray,
    sizes: np.ndarray,
    longest: int,
    every: bool,
) -> tuple[np.ndarray, int, bool]:
    """Slices, and the blocks that are to be added to each.

    Args:
        into: int64 ``[4]``: the slices, the elements of each, their address, the bytes from one to the next.
        parts: int64 ``[P, 4]``: how many blocks, their kind (0 or 1), their address, the bytes from one to the next.
        at: int64 ``[B]``, the slice that each block is added to, part after part.
        which: int64 ``[B]``, its place.
        sizes: int64 ``[3]``, bytes of an element of the slices, and of both kinds of blocks.
        longest: Elements of a row.
        every: Also slices that get nothing.

    Returns:
        int64 ``[R, 4 + W + W']``: elements, how many blocks of each kind, the slice, then the blocks of the one kind
        and of the other in their order, or 0; W; and whether all of it is aligned.
    """
    counts = _counts(into[0], parts, at)
    width, wanted = np.zeros(2, np.int64), np.zeros(into[0], np.bool_)
    for one in range(into[0]):
        wanted[one] = every or counts[one, 0] + counts[one, 1] > 0
        for kind in range(2):
            width[kind] = max(width[kind], counts[one, kind])
    pieces = -(-into[1] // longest)
    table = np.zeros((wanted.sum() * pieces, 4 + width[0] + width[1]), np.int64)
    row_of, row = np.zeros(into[0], np.int64), 0
    for one in range(into[0]):
        row_of[one] = row
        for done in range(0, into[1] if wanted[one] else 0, longest):
            table[row, 0], table[row, 3] = min(into[1] - done, longest), into[2] + one * into[3] + done * sizes[0]
            row += 1
    block = 0
    for part in parts:
        kind = part[1]
        first = 4 if kind == 0 else 4 + width[0]
        for _ in range(part[0]):
            source = part[2] + which[block] * part[3]
            for piece in range(pieces):
                row = row_of[at[block]] + piece
                table[row, first + table[row, 1 + kind]] = source + piece * longest * sizes[1 + kind]
                table[row, 1 + kind] += 1
            block += 1
    return table, width[0], _is_aligned(table)


@kernel
def _counts(slices: int, parts: np.ndarray, at: np.ndarray) -> np.ndarray:
    """int64 ``[slices, 2]``: blocks of each kind for each slice."""
    counts, block = np.zeros((slices, 2), np.int64), 0
    for part in parts:
        for _ in range(part[0]):
            counts[at[block], part[1]] += 1
            block += 1
    return counts


@kernel
def _is_aligned(table: np.ndarray) -> bool:
    """All but the numbers of blocks."""
    for row in table:
        for column in range(len(row)):
            if column != 1 and column != 2 and row[column] % ALIGNMENT != 0:
                return False
    return True
