"""Gated activations, forward and backward; the reference is :class:`hf_laer.compute.gate.ModuleGate`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2

# Gate and up that alternate are read and written in one word: what each program needs then stays in its registers.
_WORDS = {2: torch.int32, 4: torch.int64}


@triton.jit
def _load_pair(rows, at, column, inside, half, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up of some columns of row ``at``, in float32; ``rows`` are words where they alternate."""
    if INTERLEAVED:
        word = tl.load(rows + at * half + column, mask=inside, other=0)
        if KIND.primitive_bitwidth == 16:
            g, u = word.to(tl.int16), (word >> 16).to(tl.int16)
        else:
            g, u = word.to(tl.int32), (word >> 32).to(tl.int32)
        return g.to(KIND, bitcast=True).to(tl.float32), u.to(KIND, bitcast=True).to(tl.float32)
    g = tl.load(rows + at * 2 * half + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(rows + at * 2 * half + half + column, mask=inside, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _store_pair(rows, at, column, inside, half, g, u, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Writes gate and up of some columns of row ``at``."""
    if INTERLEAVED:
        if KIND.primitive_bitwidth == 16:
            low = g.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = low | (u.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        else:
            low = g.to(KIND).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            word = low | (u.to(KIND).to(tl.int32, bitcast=True).to(tl.int64) << 32)
        tl.store(rows + at * half + column, word, mask=inside)
    else:
        tl.store(rows + at * 2 * half + column, g.to(KIND), mask=inside)
        tl.store(rows + at * 2 * half + half + column, u.to(KIND), mask=inside)


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
def _load_biased(up, bias, slot, row, column, inside, half, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up of some columns of a row, with their bias if there is one."""
    g, u = _load_pair(up, row, column, inside, half, KIND, INTERLEAVED)
    if bias is not None:
        g_bias, u_bias = _load_pair(bias, tl.load(slot + row).to(tl.int64), column, inside, half, KIND, INTERLEAVED)
        g, u = g + g_bias, u + u_bias
    return g, u


# What is read one number at a time is cut out of others where rows come in chunks.
@triton.jit(do_not_specialize_on_alignment=["slot"])
def _forward_kernel(
    up, bias, slot, act_out, alpha, limit, half,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    g, u = _load_biased(up, bias, slot, row, column, inside, half, act_out.dtype.element_ty, INTERLEAVED)
    act, _, _ = _activate(g, u, alpha, limit, CLAMPED)
    tl.store(act_out + row * half + column, act.to(act_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot", "gates"])
def _backward_kernel(
    up, bias, slot, grad_act, gates, grad_up, weighted_act, grad_gates, alpha, limit, half,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gates + row)
    by_gate = tl.zeros([BLOCK], tl.float32)
    for start in range(0, half, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < half
        g, u = _load_biased(up, bias, slot, row, column, inside, half, weighted_act.dtype.element_ty, INTERLEAVED)
        act, by_g, by_u = _activate(g, u, alpha, limit, CLAMPED)
        grad = tl.load(grad_act + row * half + column, mask=inside, other=0.0).to(tl.float32)
        by_gate += tl.where(inside, grad * act, 0.0)
        grad *= gate
        # Results may take the place of operands: all are read before any is written.
        tl.debug_barrier()
        kind = weighted_act.dtype.element_ty
        _store_pair(grad_up, row, column, inside, half, grad * by_g, grad * by_u, kind, INTERLEAVED)
        tl.store(weighted_act + row * half + column, (gate * act).to(kind), mask=inside)
    tl.store(grad_gates + row, tl.sum(by_gate))


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """``[n, 2I]`` without gaps that begins where a word does; a copy if it did not."""
    rows = rows.contiguous()
    odd = (rows.storage_offset() | rows.stride(0)) % 2
    return rows.clone(memory_format=torch.contiguous_format) if odd else rows


def _words(rows: torch.Tensor | None, interleaved: bool) -> torch.Tensor | None:
    """``[n, 2I]`` without gaps, as pairs ``[n, I]`` where gate and up alternate."""
    if rows is None:
        return None
    return _in_words(rows).view(_WORDS[rows.element_size()]) if interleaved else rows.contiguous()


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
        block = min(1024, next_power_of_2(half))
        tensors = _words(up, interleaved), _words(bias, interleaved), slot, act
        constants = half, interleaved, clamped, block
        launch(_forward_kernel, (rows, cdiv(half, block)), tensors, (float(alpha), float(limit)), constants)
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
    up, weighted = _in_words(up), grad_act.contiguous()
    grad_up = up if overwrite_up else torch.empty_like(up)
    grad_gates = torch.empty(rows, dtype=torch.float32, device=up.device)
    if rows:
        up_pairs, bias_pairs, grad_pairs = (_words(one, interleaved) for one in (up, bias, grad_up))
        tensors = up_pairs, bias_pairs, slot, weighted, gates, grad_pairs, weighted, grad_gates
        constants = half, interleaved, clamped, min(1024, next_power_of_2(half))
        launch(_backward_kernel, (rows,), tensors, (float(alpha), float(limit)), constants)
    return grad_up, weighted, grad_gates
