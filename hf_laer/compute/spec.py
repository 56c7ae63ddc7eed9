"""What the engine knows of an experts module: shapes, layout flags, the gate, parameter names."""

from __future__ import annotations

from dataclasses import dataclass

from hf_laer.compute.gate import Gate


@dataclass(frozen=True)
class ExpertsSpec:
    """One family's expert MLP, ``down(gate(up(x)))``, as stacked parameters.

    Args:
        num_experts: E.
        hidden_size: H.
        is_transposed: Weights are ``[E, in, out]`` instead of ``[E, out, in]``.
        up: Name of the first product's weight.
        down: Name of the second product's weight.
        up_bias: Name of the first product's bias ``[E, out]``, or ``None``.
        down_bias: Name of the second product's bias ``[E, H]``, or ``None``.
        gate: From the first product ``[A, out]`` to the second's input ``[A, I]``, row by row.
        top_k: K, where the model's configuration says it.
    """

    num_experts: int
    hidden_size: int
    is_transposed: bool
    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    gate: Gate
    top_k: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, weights before biases."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name is not None)
