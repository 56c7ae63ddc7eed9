"""The experts' MLP over a bounded number of rows at a time, so that its activations have a bound too.

Letters in shapes: A rows sorted by slot, S slots, R received rows, H hidden, I intermediate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_laer.compute.experts import (
    ExpertGradients,
    GradRows,
    RowsKnown,
    Weights,
    experts_backward,
    first_product,
    second_product,
)
from hf_laer.compute.grouped_gemm import Arrangement, Groups, Stacks
from hf_laer.compute.low_rank import FactorGradients, LowRank
from hf_laer.compute.spec import ExpertsSpec


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive rows, and the slots that they belong to.

    Args:
        rows: Of the A rows.
        slots: Of the S slots; the first and the last may have rows in other chunks too.
        groups: The rows of these slots in this chunk.
    """

    rows: slice
    slots: slice
    groups: Groups

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of ``[A, …]``; where these are all rows, the tensor itself."""
        return tensor if self.rows == slice(0, tensor.shape[0]) else tensor[self.rows]

    def of(self, weights: Weights) -> Weights:
        """The slots' weights; where these are all slots, stacked as they are."""
        if self.slots == slice(0, sum(map(len, next(iter(weights.values()))))):
            return weights
        return {name: _cut(stacks, self.slots) for name, stacks in weights.items()}

    def of_terms(self, terms: Sequence[LowRank]) -> list[LowRank]:
        """The slots' low-rank additions."""
        return [replace(term, a=term.a[self.slots], b=term.b[self.slots]) for term in terms]


def chunks_of(groups: Groups, limit: int | None) -> list[Chunk]:
    """The rows in chunks of at most ``limit``; all in one where that is ``None``."""
    total = sum(groups.counts)
    if limit is None or total <= limit:
        return [Chunk(slice(0, total), slice(0, len(groups.counts)), groups)]
    ends = [0, *itertools.accumulate(groups.counts)]
    return [_chunk(groups, ends, start, min(start + limit, total)) for start in range(0, total, limit)]


def forward_in_chunks(
    spec: ExpertsSpec,
    weights: Weights,
    rows: torch.Tensor,
    source_row: torch.Tensor,
    chunks: Sequence[Chunk],
    terms: Sequence[LowRank],
    once_busy: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts' output ``[A, H]``, not yet weighted, and the first product ``[A, 2I]`` if there is one chunk.

    Args:
        spec: The family.
        weights: Unsharded parameters of the slots.
        rows: ``[R, H]``.
        source_row: int64 ``[A]``, the row of each assignment.
        chunks: As :func:`chunks_of` gives them.
        terms: Low-rank additions to the weights, over the slots.
        once_busy: Called once the device has the first product to do.
    """
    outs, up = [], None
    for chunk in chunks:
        own, own_terms = chunk.of(weights), chunk.of_terms(terms)
        up = first_product(spec, own, rows[chunk.of_rows(source_row)], chunk.groups, own_terms)
        if chunk is chunks[0]:
            once_busy()
        outs.append(second_product(spec, own, up, chunk.groups, own_terms))
    return (outs[0], up) if len(chunks) == 1 else (torch.cat(outs), None)


def backward_in_chunks(
    spec: ExpertsSpec,
    weights: Weights,
    rows: torch.Tensor,
    source_row: torch.Tensor,
    up: torch.Tensor | None,
    gates: torch.Tensor,
    grad_rows: GradRows,
    chunks: Sequence[Chunk],
    wanted: frozenset[str],
    terms: Sequence[LowRank],
    may_overwrite_up: bool,
    rows_known: RowsKnown,
    once_busy: Callable[[], None],
) -> ExpertGradients:
    """:func:`hf_laer.compute.experts.experts_backward` over chunks.

    Args:
        spec: The family.
        weights: Unsharded parameters of the slots.
        rows: ``[R, H]``.
        source_row: int64 ``[A]``, the row of each assignment.
        up: The first product ``[A, 2I]``, if it was kept.
        gates: float32 ``[A]`` routing weights.
        grad_rows: The gradient of each row's sum.
        chunks: As :func:`chunks_of` gives them.
        wanted: Names of the parameters whose gradients are needed.
        terms: Low-rank additions to the weights, over the slots.
        may_overwrite_up: Whether nobody will want ``up`` again.
        rows_known: Called once, with the gradients of all rows and routing weights.
        once_busy: Called once the device has the first product to do.
    """

    def one(chunk: Chunk, grad_rows: GradRows, known: RowsKnown) -> ExpertGradients:
        own, own_terms, source = chunk.of(weights), chunk.of_terms(terms), chunk.of_rows(source_row)
        ours = may_overwrite_up or up is None
        first = first_product(spec, own, rows[source], chunk.groups, own_terms) if up is None else chunk.of_rows(up)
        return experts_backward(
            spec,
            own,
            rows,
            source,
            first,
            chunk.of_rows(gates),
            grad_rows,
            chunk.groups,
            wanted,
            own_terms,
            ours,
            known,
            once_busy if chunk is chunks[0] else None,
        )

    if len(chunks) == 1:
        return one(chunks[0], grad_rows, rows_known)
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept = grad_rows()
    parts = (one(chunk, lambda: kept, lambda *grads: known.append(grads)) for chunk in chunks)
    grads = _joined(parts, chunks, weights, terms)
    of_rows, of_gates = zip(*known, strict=True)
    rows_known(torch.cat(of_rows), torch.cat(of_gates))
    return grads


def _joined(
    parts: Iterable[ExpertGradients], chunks: Sequence[Chunk], weights: Weights, terms: Sequence[LowRank]
) -> ExpertGradients:
    """A slot that several chunks share is summed in float32 at least."""
    totals: dict[str, _Total] = {}
    factors = [FactorGradients(torch.zeros_like(term.a), torch.zeros_like(term.b)) for term in terms]
    for chunk, part in zip(chunks, parts, strict=True):
        for name, stacks in part.weights.items():
            totals.setdefault(name, _Total(weights[name])).add(chunk.slots, torch.cat(stacks))
        for total, own in zip(factors, part.factors, strict=True):
            total.a[chunk.slots] += own.a
            total.b[chunk.slots] += own.b
    grads = {name: total.stacks() for name, total in totals.items()}
    return ExpertGradients(grads, factors)


class _Total:
    """One weight's gradients over the slots.

    Args:
        like: The weight's stacks.
    """

    def __init__(self, like: Stacks) -> None:
        self._sizes = [len(stack) for stack in like]
        self._sum = torch.zeros((sum(self._sizes), *like[0].shape[1:]), dtype=like[0].dtype, device=like[0].device)
        self._exact = torch.promote_types(like[0].dtype, torch.float32)
        self._last: tuple[int, torch.Tensor] | None = None

    def add(self, slots: slice, part: torch.Tensor) -> None:
        """Takes a chunk's; chunks come in order, so only its first slot can have been in one before."""
        exact = part[0].to(self._exact)
        if self._last is not None and self._last[0] == slots.start:
            exact += self._last[1]
        self._sum[slots] = part
        self._sum[slots.start] = exact
        alone = slots.stop - slots.start == 1
        self._last = slots.stop - 1, exact if alone else part[-1].to(self._exact)

    def stacks(self) -> Stacks:
        """In the weight's own stacks."""
        return self._sum.split(self._sizes)


def _chunk(groups: Groups, ends: list[int], start: int, stop: int) -> Chunk:
    """Rows ``start`` to ``stop``, both within the rows; ``ends`` are cumulative and begin with 0."""
    slots = [slot for slot in range(len(groups.counts)) if ends[slot] < stop and ends[slot + 1] > start]
    first, last = slots[0], slots[-1] + 1
    counts = [min(ends[slot + 1], stop) - max(ends[slot], start) for slot in range(first, last)]
    arrangement = Arrangement.of(counts, (len(counts),), None)
    # Not cut out of the groups' own ends, which begin anew with each of their stacks.
    own = Groups.lying(arrangement, groups.slot[start:stop] - first)
    return Chunk(slice(start, stop), slice(first, last), own)


def _cut(stacks: Stacks, slots: slice) -> Stacks:
    """The matrices of these slots."""
    found, at = [], 0
    for stack in stacks:
        own = stack[max(slots.start - at, 0) : max(slots.stop - at, 0)]
        found += [own] if len(own) else []
        at += len(stack)
    return tuple(found) or (stacks[0][:0],)
