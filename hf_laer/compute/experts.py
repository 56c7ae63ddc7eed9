"""The experts' MLP over unsharded slots, forward and backward, with no autograd graph.

Letters in shapes: A rows sorted by slot, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_laer.compute.grouped_gemm import Groups, group_sums, rows_outer, rows_times
from hf_laer.compute.spec import ExpertsSpec

Weights = dict[str, torch.Tensor]


class ExpertGradients(NamedTuple):
    """Gradients of :func:`experts_forward` under a weighted sum of its output rows.

    Args:
        rows: ``[A, H]``, of the input rows.
        gates: float32 ``[A]``, of each row's routing weight.
        weights: Parameter name to ``[S, …]``, only those asked for.
    """

    rows: torch.Tensor
    gates: torch.Tensor
    weights: Weights


def first_product(spec: ExpertsSpec, weights: Weights, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``[A, H]`` to the gate's input ``[A, 2I]`` (``[A, I]`` without a gate)."""
    return _linear(spec, rows, weights[spec.up], _bias(weights, spec.up_bias), groups)


def second_product(spec: ExpertsSpec, weights: Weights, up: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The gate's input ``[A, 2I]`` to the experts' output ``[A, H]``, not yet weighted."""
    return _linear(spec, spec.gate(up), weights[spec.down], _bias(weights, spec.down_bias), groups)


def experts_backward(
    spec: ExpertsSpec,
    weights: Weights,
    rows: torch.Tensor,
    up: torch.Tensor,
    gates: torch.Tensor,
    grad_out: torch.Tensor,
    groups: Groups,
    wanted: frozenset[str],
) -> ExpertGradients:
    """Backward of ``gates * second_product(first_product(rows))``.

    The gradient of a routing weight is formed from the second product's input, so the experts' output need not be
    kept: ``<g, down(a)> = <down^T(g), a>``.

    Args:
        spec: The family.
        weights: Unsharded parameters of the slots.
        rows: ``[A, H]`` input rows.
        up: ``[A, 2I]`` the first product.
        gates: ``[A]`` routing weights.
        grad_out: ``[A, H]``, the gradient of each row's token, not yet weighted.
        groups: Rows per slot.
        wanted: Names of the parameters whose gradients are needed.
    """
    grad_act = rows_times(grad_out, _backward_view(spec, weights[spec.down]), groups)
    gate_column = gates.to(rows.dtype).unsqueeze(1)
    with torch.enable_grad():
        up_leaf = up.detach().requires_grad_()
        act = spec.gate(up_leaf)
        (grad_up,) = torch.autograd.grad(act, up_leaf, grad_act * gate_column)
    act = act.detach()
    grad_gates = (grad_act.float() * act.float()).sum(1)
    if spec.down_bias is not None:
        bias_rows = _per_row(weights[spec.down_bias], groups)
        grad_gates += (grad_out.float() * bias_rows.float()).sum(1)
    grad_rows = rows_times(grad_up, _backward_view(spec, weights[spec.up]), groups)
    weighted = grad_out * gate_column
    grads: Weights = {}
    for name, left, right in ((spec.up, rows, grad_up), (spec.down, act, weighted)):
        if name in wanted:
            grads[name] = rows_outer(*((left, right) if spec.is_transposed else (right, left)), groups)
    for bias, grad in ((spec.up_bias, grad_up), (spec.down_bias, weighted)):
        if bias is not None and bias in wanted:
            grads[bias] = group_sums(grad, groups)
    return ExpertGradients(grad_rows, grad_gates, grads)


def _linear(
    spec: ExpertsSpec, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups
) -> torch.Tensor:
    out = rows_times(rows, weight if spec.is_transposed else weight.transpose(1, 2), groups)
    return out if bias is None else out.add_(_per_row(bias, groups))


def _backward_view(spec: ExpertsSpec, weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2) if spec.is_transposed else weight


def _bias(weights: Weights, name: str | None) -> torch.Tensor | None:
    return None if name is None else weights[name]


def _per_row(bias: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``[S, n]`` to ``[A, n]``: each row's slot's bias."""
    counts = torch.tensor(groups.counts, dtype=torch.int64).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(counts, dim=0, output_size=sum(groups.counts))
