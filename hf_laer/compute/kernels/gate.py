"""Gated activations, forward and backward; the reference is :class:`hf_laer.compute.gate.ModuleGate`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _load_pair(rows, at, column, inside, half, INTERLEAVED: tl.constexpr):
    """Gate and up of some columns of the row that starts at ``at``, in float32."""
    if INTERLEAVED:
        # Both at once, so that neighbours read neighbouring bytes.
        pair = 2 * column[:, None] + tl.arange(0, 2)[None, :]
        return tl.split(tl.load(rows + at + pair, mask=inside[:, None], other=0.0).to(tl.float32))
    g = tl.load(rows + at + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(rows + at + half + column, mask=inside, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _store_pair(rows, at, column, inside, half, g, u, INTERLEAVED: tl.constexpr):
    """Writes gate and up of some columns."""
    if INTERLEAVED:
        pair = 2 * column[:, None] + tl.arange(0, 2)[None, :]
        tl.store(rows + at + pair, tl.join(g, u).to(rows.dtype.element_ty), mask=inside[:, None])
    else:
        tl.store(rows + at + column, g.to(rows.dtype.element_ty), mask=inside)
        tl.store(rows + at + half + column, u.to(rows.dtype.element_ty), mask=inside)


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
    g, u = _load_pair(up, row * 2 * half, column, inside, half, INTERLEAVED)
    if HAS_BIAS:
        g_bias, u_bias = _load_pair(
            bias, tl.load(slot + row).to(tl.int64) * 2 * half, column, inside, half, INTERLEAVED
        )
        g, u = g + g_bias, u + u_bias
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
        g, u = _load_pair(up, row * 2 * half, column, inside, half, INTERLEAVED)
        if HAS_BIAS:
            g_bias, u_bias = _load_pair(bias, base, column, inside, half, INTERLEAVED)
            g, u = g + g_bias, u + u_bias
        act, by_g, by_u = _activate(g, u, alpha, limit, CLAMPED)
        grad = tl.load(grad_act + row * half + column, mask=inside, other=0.0).to(tl.float32)
        by_gate += tl.where(inside, grad * act, 0.0)
        grad *= gate
        # Results may take the place of operands: all are read before any is written.
        tl.debug_barrier()
        _store_pair(grad_up, row * 2 * half, column, inside, half, grad * by_g, grad * by_u, INTERLEAVED)
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
