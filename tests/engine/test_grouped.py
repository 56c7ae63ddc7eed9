"""Products of grouped rows: every arrangement of the rows gives each row its slot's product."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.compute import grouped_gemm
from hf_laer.compute.grouped_gemm import Arrangement, Groups, alone_from, rows_outer, rows_times


@pytest.mark.parametrize("kernel", [False, True])
@settings(deadline=None, max_examples=150)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    own=st.integers(0, 7),
    least=st.none() | st.integers(1, 6),
)
def test_products(kernel: bool, counts: list[int], own: int, least: int | None) -> None:
    """With and without ``grouped_mm``, in one stack or two, either of them empty."""
    own = min(own, len(counts))
    stacks = (own, len(counts) - own)
    groups = Groups.of(counts, torch.device("cpu"), least, stacks)
    generator = torch.Generator().manual_seed(sum(counts))
    left, right = (torch.randn(sum(counts), size, generator=generator) for size in (8, 12))
    weight = torch.randn(len(counts), 8, 12, generator=generator)
    takes = patch.object(grouped_gemm, "_kernel_takes", lambda one, other: kernel and len(one) > 0 and len(other) > 0)
    with takes:
        product = rows_times(left, weight.split(stacks), groups)
        outer = torch.cat(rows_outer(left, right, groups, stacks))
    torch.testing.assert_close(product, torch.einsum("ak,akn->an", left, weight[groups.slot]))
    want = torch.zeros_like(weight)
    for row, slot in enumerate(groups.slot):
        want[slot] += torch.outer(left[row], right[row])
    torch.testing.assert_close(outer, want)


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 9), max_size=2),
    least=st.none() | st.integers(1, 6),
)
def test_arrangement(counts: list[int], cuts: list[int], least: int | None) -> None:
    edges = [0, *sorted(min(cut, len(counts)) for cut in cuts), len(counts)]
    stacks = tuple(b - a for a, b in pairwise(edges))
    made = Arrangement.of(counts, stacks, least)
    assert [made.order[place] for place in made.places()] == list(range(len(counts)))
    assert made.alone == {slot for slot, count in enumerate(counts) if least is not None and count >= least}
    ends = made.ends().tolist()
    for start, stop in pairwise(edges):
        inside = list(made.order[start:stop])
        assert sorted(inside) == list(range(start, stop))
        together = [slot for slot in inside if slot not in made.alone]
        assert inside[: len(together)] == sorted(together), "grouped_mm takes them slot by slot"
        assert ends[start:stop] == [sum(counts[s] for s in together if s <= slot) for slot in range(start, stop)]


def test_how_many_rows_are_alone() -> None:
    rows = alone_from(2880, 5760)
    assert 2 * 2880 * 5760 * (rows - 1) < 10**11 <= 2 * 2880 * 5760 * rows
