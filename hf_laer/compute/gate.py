"""Gates: from the first product of the experts' MLP to the second's input, and back.

The fused kernels serve the gates that :func:`recognize` knows; any other goes through the module's own function and
its local vector-Jacobian product. Letters in shapes: A rows, I intermediate, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_laer.compute.kernels import usable


class GateGradients(NamedTuple):
    """Backward of ``gates * <·, act(up)>``.

    Args:
        up: ``[A, 2I]``, of the first product.
        weighted_act: ``[A, I]``, the activation times the routing weight, for the second product's weight gradient.
        gates: float32 ``[A]``, of the routing weights.
    """

    up: torch.Tensor
    weighted_act: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True)
class FusedGate:
    """A gate that the kernels know.

    Args:
        interleaved: Gate and up alternate; else the gate's half comes first.
        clamped: ``(clamp(up) + 1) · g · sigmoid(alpha · g)`` with ``g = min(gate, limit)``; else ``silu(gate) · up``.
        alpha: See above.
        limit: See above.
    """

    interleaved: bool
    clamped: bool
    alpha: float = 1.0
    limit: float = 0.0

    def reference(self, up: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch, ``[A, 2I]`` to ``[A, I]``."""
        gate, linear = (up[..., ::2], up[..., 1::2]) if self.interleaved else up.chunk(2, -1)
        if not self.clamped:
            return torch.nn.functional.silu(gate) * linear
        gate = gate.clamp(max=self.limit)
        return (linear.clamp(-self.limit, self.limit) + 1) * gate * torch.sigmoid(gate * self.alpha)


class Gate:
    """A module's gate.

    Args:
        function: The module's own, ``[A, 2I]`` to ``[A, I]``.
        fused: The kernels' equivalent, if there is one.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], fused: FusedGate | None = None) -> None:
        self.function, self.fused = function, fused

    def forward(self, up: torch.Tensor, bias: torch.Tensor | None, slot: torch.Tensor) -> torch.Tensor:
        """The activation of the biased first product.

        Args:
            up: ``[A, 2I]``, without its bias.
            bias: ``[S, 2I]`` or ``None``.
            slot: int64 ``[A]``, each row's slot.
        """
        if self.fused is not None and _takes(up):
            from hf_laer.compute.kernels.gate import gate_forward

            return gate_forward(up, bias, slot, **vars(self.fused))
        return self.function(_biased(up, bias, slot))

    def backward(
        self,
        up: torch.Tensor,
        bias: torch.Tensor | None,
        slot: torch.Tensor,
        grad_act: torch.Tensor,
        gates: torch.Tensor,
        may_overwrite_up: bool = False,
    ) -> GateGradients:
        """See :class:`GateGradients`; ``gates`` is float32 ``[A]``.

        ``grad_act`` ``[A, I]`` is not yet weighted, and is overwritten; so is ``up`` where it may be.
        """
        if self.fused is not None and _takes(up):
            from hf_laer.compute.kernels.gate import gate_backward

            found = gate_backward(up, bias, slot, grad_act, gates, overwrite_up=may_overwrite_up, **vars(self.fused))
            return GateGradients(*found)
        column = gates.to(up.dtype).unsqueeze(1)
        with torch.enable_grad():
            leaf = _biased(up, bias, slot).detach().requires_grad_()
            act = self.function(leaf)
            (grad_up,) = torch.autograd.grad(act, leaf, grad_act * column)
        act = act.detach()
        return GateGradients(grad_up, act * column, (grad_act.float() * act.float()).sum(1))


def recognize(function: Callable[[torch.Tensor], torch.Tensor], alpha: float, limit: float) -> FusedGate | None:
    """The kernels' equivalent of a module's gate, found by comparing values; ``None`` if there is none.

    Args:
        function: The module's gate.
        alpha: The module's ``alpha``, if it has one.
        limit: The module's ``limit``, if it has one.
    """
    # On the CPU, also where the default device is another.
    cpu = torch.device("cpu")
    probe = torch.randn(8, 24, generator=torch.Generator(cpu).manual_seed(0), device=cpu)
    probe *= torch.tensor([1.0, 10.0], device=cpu).repeat_interleave(4).unsqueeze(1)
    try:
        with torch.no_grad():
            want = function(probe)
    except (RuntimeError, TypeError):
        return None
    for gate in (FusedGate(False, False), FusedGate(True, False), FusedGate(True, True, alpha, limit)):
        if want.shape == (8, 12) and torch.allclose(gate.reference(probe), want, rtol=1e-5, atol=1e-6):
            return gate
    return None


def _takes(up: torch.Tensor) -> bool:
    """Whether the kernels can: they compute in float32."""
    return usable(up) and up.itemsize <= torch.float32.itemsize


def _biased(up: torch.Tensor, bias: torch.Tensor | None, slot: torch.Tensor) -> torch.Tensor:
    return up if bias is None else up + bias[slot]
