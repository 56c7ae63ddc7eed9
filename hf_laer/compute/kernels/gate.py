"""Gated activations, forward and backward; the reference is :class:`hf_laer.compute.gate.ModuleGate`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _load_pair(up, bias, row, base, column, inside, half, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Gate and up of some columns of one row, in float32, bias added."""
    first = 2 * column if INTERLEAVED else column
    second = first + 1 if INTERLEAVED else first + half
    g = tl.load(up + row * 2 * half + first, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * 2 * half + second, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        g += tl.load(bias + base + first, mask=inside, other=0.0).to(tl.float32)
        u += tl.load(bias + base + second, mask=inside, other=0.0).to(tl.float32)
    return g, u, first, second


@triton.jit
def _activate(g, u, alpha, limit, CLAMPED: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
    if CLAMPED:
        inside_g = g <= limit
        inside_u = (u >= -limit) & (u <= limit)
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        s = 1.0 / (1.0 + tl.exp(-alpha * g))
        act = (u + 1.0) * g * s
        by_g = tl.where(inside_g, (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)), 0.0)
        by_u = tl.where(inside_u, g * s, 0.0)
    else:
        s = 1.0 / (1.0 + tl.exp(-g))
        act = g * s * u
        by_g = u * s * (1.0 + g * (1.0 - s))
        by_u = g * s
    return act, by_g, by_u


@triton.jit
def _forward_kernel(
    up, bias, slot, act_out, half, alpha, limit,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    base = row * 0
    if HAS_BIAS:
        base = tl.load(slot + row).to(tl.int64) * 2 * half
    g, u, _, _ = _load_pair(up, bias, row, base, column, inside, half, INTERLEAVED, HAS_BIAS)
    act, _, _ = _activate(g, u, alpha, limit, CLAMPED)
    tl.store(act_out + row * half + column, act.to(act_out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    up, bias, slot, grad_act, gates, grad_up, weighted_act, grad_gates, half, alpha, limit,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gates + row)
    base = row * 0
    if HAS_BIAS:
        base = tl.load(slot + row).to(tl.int64) * 2 * half
    by_gate = tl.zeros([BLOCK], tl.float32)
    for start in range(0, half, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < half
        g, u, first, second = _load_pair(up, bias, row, base, column, inside, half, INTERLEAVED, HAS_BIAS)
        act, by_g, by_u = _activate(g, u, alpha, limit, CLAMPED)
        grad = tl.load(grad_act + row * half + column, mask=inside, other=0.0).to(tl.float32)
        by_gate += tl.where(inside, grad * act, 0.0)
        grad *= gate
        # Results may take the place of operands: all are read before any is written.
        tl.debug_barrier()
        tl.store(grad_up + row * 2 * half + first, (grad * by_g).to(grad_up.dtype.element_ty), mask=inside)
        tl.store(grad_up + row * 2 * half + second, (grad * by_u).to(grad_up.dtype.element_ty), mask=inside)
        weighted = (gate * act).to(weighted_act.dtype.element_ty)
        tl.store(weighted_act + row * half + column, weighted, mask=inside)
    tl.store(grad_gates + row, tl.sum(by_gate))


def gate_forward(
    up: torch.Tensor,
    bias: torch.Tensor | None,
    slot: torch.Tensor | None,
    *,
    interleaved: bool,
    clamped: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """``[A, 2I]`` to ``[A, I]``; see the reference."""
    rows, half = up.shape[0], up.shape[1] // 2
    act = up.new_empty(rows, half)
    if act.numel():
        block = min(1024, triton.next_power_of_2(half))
        _forward_kernel[rows, triton.cdiv(half, block)](
            up.contiguous(), bias, slot, act, half, alpha, limit,
            INTERLEAVED=interleaved, CLAMPED=clamped, HAS_BIAS=bias is not None, BLOCK=block,
        )  # fmt: skip
    return act


def gate_backward(
    up: torch.Tensor,
    bias: torch.Tensor | None,
    slot: torch.Tensor | None,
    grad_act: torch.Tensor,
    gates: torch.Tensor,
    *,
    interleaved: bool,
    clamped: bool,
    alpha: float,
    limit: float,
    overwrite_up: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of ``up``, the weighted activation, and the gradient of the routing weights; see the reference.

    The activation is written over ``grad_act``, the gradient over ``up`` if that is allowed.
    """
    rows, half = up.shape[0], up.shape[1] // 2
    up, weighted = up.contiguous(), grad_act.contiguous()
    grad_up = up if overwrite_up else torch.empty_like(up)
    grad_gates = torch.empty(rows, dtype=torch.float32, device=up.device)
    if rows:
        _backward_kernel[(rows,)](
            up, bias, slot, weighted, gates, grad_up, weighted, grad_gates,
            half, alpha, limit,
            INTERLEAVED=interleaved, CLAMPED=clamped, HAS_BIAS=bias is not None,
            BLOCK=min(1024, triton.next_power_of_2(half)),
        )  # fmt: skip
    return grad_up, weighted, grad_gates
