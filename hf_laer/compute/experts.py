"""The experts' MLP over unsharded slots, forward and backward, with no autograd graph.

Letters in shapes: A rows sorted by slot, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_laer.compute import low_rank
from hf_laer.compute.grouped_gemm import Groups, Stacks, group_sums, rows_outer, rows_times
from hf_laer.compute.low_rank import FactorGradients, LowRank
from hf_laer.compute.spec import ExpertsSpec

Weights = dict[str, Stacks]
# Takes the gradients of the input rows ``[A, H]`` and of each one's routing weight, float32 ``[A]``.
RowsKnown = Callable[[torch.Tensor, torch.Tensor], None]
# Gives the gradient of each received row's sum ``[R, H]``, asked once: so that nobody need keep it.
GradRows = Callable[[], torch.Tensor]


class ExpertGradients(NamedTuple):
    """Gradients of what the experts are made of.

    Args:
        weights: Parameter name to stacks of ``[S', …]``, only those asked for.
        factors: Of each low-rank addition's factors, in the order of the additions.
    """

    weights: Weights
    factors: list[FactorGradients]


def first_product(
    spec: ExpertsSpec, weights: Weights, rows: torch.Tensor, groups: Groups, terms: Sequence[LowRank] = ()
) -> torch.Tensor:
    """``[A, H]`` to ``[A, 2I]`` (``[A, I]`` without a gate), its bias not yet added."""
    return _product(spec, weights, spec.up, rows, groups, terms)


def second_product(
    spec: ExpertsSpec, weights: Weights, up: torch.Tensor, groups: Groups, terms: Sequence[LowRank] = ()
) -> torch.Tensor:
    """The first product to the experts' output ``[A, H]``, neither biased nor weighted yet."""
    act = spec.gate.forward(up, bias_of(weights, spec.up_bias), groups.slot)
    return _product(spec, weights, spec.down, act, groups, terms)


def _product(
    spec: ExpertsSpec, weights: Weights, name: str, rows: torch.Tensor, groups: Groups, terms: Sequence[LowRank]
) -> torch.Tensor:
    out = rows_times(rows, _forward_view(spec, weights[name]), groups)
    for term in low_rank.of_weight(terms, name):
        out += low_rank.forward(rows, term, groups)
    return out


def _product_backward(
    spec: ExpertsSpec, weights: Weights, name: str, grad: torch.Tensor, groups: Groups, terms: Sequence[LowRank]
) -> torch.Tensor:
    """The gradient of a product's rows."""
    out = rows_times(grad, _backward_view(spec, weights[name]), groups)
    for term in low_rank.of_weight(terms, name):
        out += low_rank.backward(grad, term, groups)
    return out


def experts_backward(
    spec: ExpertsSpec,
    weights: Weights,
    rows: torch.Tensor,
    source_row: torch.Tensor,
    up: torch.Tensor,
    gates: torch.Tensor,
    grad_rows: GradRows,
    groups: Groups,
    wanted: frozenset[str],
    terms: Sequence[LowRank],
    may_overwrite_up: bool,
    rows_known: RowsKnown,
    once_busy: Callable[[], None] | None = None,
) -> ExpertGradients:
    """Backward of ``gates * (second_product(first_product(rows[source_row])) + bias)``.

    The gradient of a routing weight is formed from the second product's input, so the experts' output need not be
    kept: ``<g, down(a)> = <down^T(g), a>``. The rows' gradients come first, so that they can travel while the weights'
    are formed. Rows are gathered where they are used, and what is used no more is let go.

    Args:
        spec: The family.
        weights: Unsharded parameters of the slots.
        rows: ``[R, H]`` received rows.
        source_row: int64 ``[A]``, the received row of each assignment.
        up: ``[A, 2I]`` the first product.
        gates: float32 ``[A]`` routing weights.
        grad_rows: The gradient of each received row's sum.
        groups: Rows per slot.
        wanted: Names of the parameters whose gradients are needed.
        terms: Low-rank additions to the weights, over the slots.
        may_overwrite_up: Whether nobody will want ``up`` again.
        rows_known: Called once, before the weights' gradients are formed.
        once_busy: Called once the device has the first product to do.
    """
    biases = bias_of(weights, spec.up_bias), bias_of(weights, spec.down_bias)
    grad_out = grad_rows()[source_row]
    grad_act = _product_backward(spec, weights, spec.down, grad_out, groups, terms)
    if once_busy is not None:
        once_busy()
    gate = spec.gate.backward(up, biases[0], groups.slot, grad_act, gates, may_overwrite_up)
    grad_up, grad_gates, weighted_act = gate.up, gate.gates, gate.weighted_act
    del up, grad_act, gate
    if biases[1] is not None:
        # One product for all slots and a pick, rather than a bias row for each row.
        grad_gates = grad_gates + (grad_out @ biases[1].t()).float().gather(1, groups.slot.unsqueeze(1)).squeeze(1)
    rows_known(_product_backward(spec, weights, spec.up, grad_up, groups, terms), grad_gates)
    grads = _weight_gradients(spec, weights, spec.down, weighted_act, grad_out, groups, wanted)
    if spec.down_bias is not None and spec.down_bias in wanted:
        grads[spec.down_bias] = group_sums(grad_out, groups, gates).split(_sizes(weights, spec.down))
    of_down = _factor_gradients(terms, spec.down, weighted_act, grad_out, groups)
    del weighted_act, grad_out
    inputs = rows[source_row]
    grads |= _weight_gradients(spec, weights, spec.up, inputs, grad_up, groups, wanted)
    if spec.up_bias is not None and spec.up_bias in wanted:
        grads[spec.up_bias] = group_sums(grad_up, groups).split(_sizes(weights, spec.up))
    of_up = _factor_gradients(terms, spec.up, inputs, grad_up, groups)
    return ExpertGradients(grads, [(of_up if term.weight == spec.up else of_down).pop(0) for term in terms])


def _weight_gradients(
    spec: ExpertsSpec,
    weights: Weights,
    name: str,
    rows: torch.Tensor,
    grad: torch.Tensor,
    groups: Groups,
    wanted: frozenset[str],
) -> Weights:
    """The gradient of the weight that ``rows`` were multiplied with, if it is wanted."""
    if name not in wanted:
        return {}
    left, right = (rows, grad) if spec.is_transposed else (grad, rows)
    return {name: rows_outer(left, right, groups, _sizes(weights, name))}


def _factor_gradients(
    terms: Sequence[LowRank], name: str, rows: torch.Tensor, grad: torch.Tensor, groups: Groups
) -> list[FactorGradients]:
    return [low_rank.factor_gradients(rows, grad, term, groups) for term in low_rank.of_weight(terms, name)]


def _sizes(weights: Weights, name: str) -> tuple[int, ...]:
    return tuple([stack.shape[0] for stack in weights[name]])


def bias_of(weights: Weights, name: str | None) -> torch.Tensor | None:
    """The unsharded bias of that name ``[S, n]``, if there is one."""
    return None if name is None else torch.cat(weights[name])


def _forward_view(spec: ExpertsSpec, stacks: Stacks) -> Stacks:
    return stacks if spec.is_transposed else tuple(stack.transpose(1, 2) for stack in stacks)


def _backward_view(spec: ExpertsSpec, stacks: Stacks) -> Stacks:
    return tuple(stack.transpose(1, 2) for stack in stacks) if spec.is_transposed else stacks
