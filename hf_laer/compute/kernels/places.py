"""Where other ranks' rows are: what kernels need that read and write them.

A kernel is given the address of a place on each rank, and where each rank's rows end, as numbers of its launch: so that
nothing has to be copied to the device first. Of numbers that there are no ranks for none is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from hf_laer.compute.kernels import MOST_RANKS

BASES, _ENDS = ([f"{letter}{at}" for at in range(MOST_RANKS)] for letter in "be")
NUMBERS = [*BASES, *_ENDS]


@triton.jit
def one_of(which, n0, n1, n2, n3, n4, n5, n6, n7, RANKS: tl.constexpr):
    """The number of a rank; of each lane's, if there are several."""
    found = n0 + which * 0
    if RANKS > 1:
        found = tl.where(which == 1, n1, found)
    if RANKS > 2:
        found = tl.where(which == 2, n2, found)
    if RANKS > 3:
        found = tl.where(which == 3, n3, found)
    if RANKS > 4:
        found = tl.where(which == 4, n4, found)
    if RANKS > 5:
        found = tl.where(which == 5, n5, found)
    if RANKS > 6:
        found = tl.where(which == 6, n6, found)
    if RANKS > 7:
        found = tl.where(which == 7, n7, found)
    return found


@triton.jit
def rank_of(at, e0, e1, e2, e3, e4, e5, e6, RANKS: tl.constexpr):
    """To which rank an element goes, given where those to each rank end."""
    rank = at * 0
    if RANKS > 1:
        rank += (at >= e0).to(tl.int64)
    if RANKS > 2:
        rank += (at >= e1).to(tl.int64)
    if RANKS > 3:
        rank += (at >= e2).to(tl.int64)
    if RANKS > 4:
        rank += (at >= e3).to(tl.int64)
    if RANKS > 5:
        rank += (at >= e4).to(tl.int64)
    if RANKS > 6:
        rank += (at >= e5).to(tl.int64)
    if RANKS > 7:
        rank += (at >= e6).to(tl.int64)
    return rank


@triton.jit
def start_of(rank, e0, e1, e2, e3, e4, e5, e6, RANKS: tl.constexpr):
    """Where the rows of a rank begin: where those of the one before end."""
    return tl.where(rank > 0, one_of(rank - 1, e0, e1, e2, e3, e4, e5, e6, 0, RANKS), 0)


@triton.jit
def store_row(base, like, row, column, value, inside, columns: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of a row, among those that begin at an address, in the dtype of ``like``."""
    target = base.to(tl.pointer_type(like.dtype.element_ty)) + row * columns + column
    if columns % 8 == 0:
        # Rows of 16 bytes at least, in aligned places: the compiler, which does not know, moves one element at a time.
        target = tl.max_contiguous(tl.multiple_of(target, 16), BLOCK)
    tl.store(target, value.to(like.dtype.element_ty), mask=inside)


def eight(numbers: Sequence[int]) -> list[int]:
    """As many as a launch has."""
    return [*numbers, *[0] * (MOST_RANKS - len(numbers))]
