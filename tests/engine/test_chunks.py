"""Experts over a bounded number of rows at a time: the same output and gradients."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.compute import chunks as module
from hf_laer.compute import grouped_gemm
from hf_laer.compute.chunks import backward_in_chunks, chunks_of, forward_in_chunks
from hf_laer.compute.grouped_gemm import Groups
from tests.engine import cases


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 6))
def test_every_row_is_in_one_chunk(counts: list[int], limit: int, own: int) -> None:
    own = min(own, len(counts))
    groups = Groups.of(counts, torch.device("cpu"), stacks=(own, len(counts) - own))
    chunks = chunks_of(groups, limit)
    assert [row for chunk in chunks for row in range(chunk.rows.start, chunk.rows.stop)] == list(range(sum(counts)))
    for chunk in chunks if sum(counts) > limit else ():
        assert sum(chunk.groups.counts) == chunk.rows.stop - chunk.rows.start <= limit
        assert chunk.groups.ends.tolist() == torch.tensor(chunk.groups.counts).cumsum(0).tolist()
        assert (chunk.groups.slot + chunk.slots.start).tolist() == groups.slot[chunk.rows].tolist()


@pytest.mark.parametrize("kernel", [False, True])
@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=4, max_size=4), limit=st.integers(1, 12), own=st.integers(1, 3))
def test_chunks_change_nothing(kernel: bool, counts: list[int], limit: int, own: int) -> None:
    """With and without ``grouped_mm``, the slots in two stacks, biases, and fewer rows than assignments."""
    takes = patch.object(grouped_gemm, "_kernel_takes", lambda one, other: kernel and len(one) > 0 and len(other) > 0)
    with takes:
        check_chunks(counts, limit, own, torch.float32 if kernel else torch.float64)


def check_chunks(counts: list[int], limit: int, own: int, dtype: torch.dtype) -> None:
    """In chunks as in one go."""
    spec, weights = experts(own, dtype)
    groups = Groups.of(counts, torch.device("cpu"), stacks=(own, 4 - own))
    generator = torch.Generator().manual_seed(sum(counts))
    rows, grad = (torch.randn(5, 8, generator=generator, dtype=dtype) for _ in range(2))
    source = torch.randint(0, 5, (sum(counts),), generator=generator)
    gates = torch.rand(sum(counts), generator=generator)
    results, busy = [], Mock()
    for at_most in (None, limit):
        chunks = chunks_of(groups, at_most)
        out, up = forward_in_chunks(spec, weights, rows, source, chunks, (), busy)
        known: list[torch.Tensor] = []
        args = (spec, weights, rows, source, up, gates, lambda: grad, chunks, frozenset(weights), (), False)
        found = backward_in_chunks(*args, lambda *grads, known=known: known.extend(grads), busy)
        assert busy.call_count == 2
        busy.reset_mock()
        results.append([out, *known, *(torch.cat(found.weights[name]) for name in sorted(weights))])
    loose = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole, **loose)


def experts(own: int, dtype: torch.dtype):
    """gpt-oss's experts: ``own`` of these slots and the rest apart."""
    from hf_laer.compute.gate import FusedGate, Gate
    from hf_laer.compute.spec import ExpertsSpec

    fused = FusedGate(interleaved=True, clamped=True)
    spec = ExpertsSpec(4, 8, True, "up", "down", "up_bias", "down_bias", Gate(fused.reference, fused))
    shapes = {"up": (4, 8, 8), "down": (4, 4, 8), "up_bias": (4, 8), "down_bias": (4, 8)}
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return spec, {name: (full[:own], full[own:]) for name, full in made.items()}


@pytest.mark.parametrize(
    "strategy", ["llep", "fsep+llep:sharded", pytest.param("fsep+llep:whole", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_equals_unpatched(ranks, family: str, strategy: str) -> None:
    config = {"strategy": strategy, "history": 1, "max_rows_per_rank": 5}
    moved = ranks(2).run(cases.equal_to_unpatched, family=family, config=config)
    assert moved[0]["records"] > 0


def test_no_chunk_is_larger(ranks) -> None:
    assert all(most <= 5 for most in ranks(2).run(largest))


def largest() -> int:
    """Rows of the largest product of a step under a limit of five."""
    seen: list[int] = []
    product = module.first_product

    def watched(spec, weights, rows, groups, terms):
        seen.append(len(rows))
        return product(spec, weights, rows, groups, terms)

    with patch.object(module, "first_product", watched):
        cases.equal_to_unpatched("mixtral", {"strategy": "ep", "max_rows_per_rank": 5}, steps=1)
    assert len(seen) > 8, "nothing was cut"
    return max(seen)
