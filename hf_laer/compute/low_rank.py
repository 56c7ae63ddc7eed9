"""Low-rank additions to the experts' weights (LoRA), as small grouped products beside the large ones.

The product of a row with ``W + scaling · a @ b`` is formed without that sum: no rank ever makes an addition of the size
of a weight. Letters in shapes: E experts, S slots, A rows sorted by slot, r rank of the addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hf_laer.compute.grouped_gemm import Groups, rows_outer, rows_times

# The grouped kernel takes multiples of 16 bytes; a few zero columns cost less than a product for each slot.
_RANK_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class LowRank:
    """``scaling · a @ b``, an addition to one weight, for all experts or for those in slots.

    Args:
        weight: The weight's name.
        a: ``[E, in, r]``, whichever way the weight itself is stored.
        b: ``[E, r, out]``.
        scaling: Its factor.
    """

    weight: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def at(self, held: Sequence[int], dtype: torch.dtype) -> LowRank:
        """The addition to the weights of the experts ``held`` by the slots: ``[S, in, r']`` and ``[S, r', out]``.

        r' is r, padded with zeros.
        """
        experts, padding = self._slots(held), -self.a.shape[2] % _RANK_MULTIPLE
        a, b = self.a[experts].to(dtype), self.b[experts].to(dtype)
        pad = torch.nn.functional.pad
        return replace(self, a=pad(a, (0, padding)).contiguous(), b=pad(b, (0, 0, 0, padding)).contiguous())

    def over_all(self, held: Sequence[int], grads: FactorGradients) -> FactorGradients:
        """Gradients of the slots' factors as gradients of all experts': zero for those that no slot holds."""
        experts, rank = self._slots(held), self.a.shape[2]
        a, b = torch.zeros_like(self.a), torch.zeros_like(self.b)
        a[experts], b[experts] = grads.a[..., :rank].to(a.dtype), grads.b[:, :rank].to(b.dtype)
        return FactorGradients(a, b)

    def _slots(self, held: Sequence[int]) -> torch.Tensor:
        return torch.tensor(held, dtype=torch.int64).to(self.a.device, non_blocking=True)


class FactorGradients(NamedTuple):
    """Gradients of :class:`LowRank`'s factors, in their shapes."""

    a: torch.Tensor
    b: torch.Tensor


def of_weight(terms: Iterable[LowRank], weight: str) -> list[LowRank]:
    """The additions to one weight."""
    return [term for term in terms if term.weight == weight]


def forward(rows: torch.Tensor, term: LowRank, groups: Groups) -> torch.Tensor:
    """What the addition adds to the product: ``[A, in]`` to ``[A, out]``."""
    return rows_times(_scaled(rows, term.a, term, groups), (term.b,), groups)


def backward(grad: torch.Tensor, term: LowRank, groups: Groups) -> torch.Tensor:
    """What it adds to the gradient of the rows: ``[A, out]`` to ``[A, in]``."""
    return rows_times(_scaled(grad, term.b.transpose(1, 2), term, groups), (term.a.transpose(1, 2),), groups)


def factor_gradients(rows: torch.Tensor, grad: torch.Tensor, term: LowRank, groups: Groups) -> FactorGradients:
    """Gradients over the slots' rows.

    Args:
        rows: ``[A, in]``, what the weight was multiplied with.
        grad: ``[A, out]``, of the product.
        term: The addition, over slots.
        groups: Rows per slot.
    """
    sizes = (len(groups.counts),)
    (of_a,) = rows_outer(rows, _scaled(grad, term.b.transpose(1, 2), term, groups), groups, sizes)
    (of_b,) = rows_outer(_scaled(rows, term.a, term, groups), grad, groups, sizes)
    return FactorGradients(of_a, of_b)


def _scaled(rows: torch.Tensor, factor: torch.Tensor, term: LowRank, groups: Groups) -> torch.Tensor:
    return rows_times(rows, (factor,), groups).mul_(term.scaling)
