"""Transformers' own expert parallelism with an all-to-all (5.23 and later), as a rival of one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

NEEDS = "transformers >= 5.23"


def is_available() -> bool:
    """Whether the installed Transformers has it."""
    try:
        from transformers.distributed.expert_parallel import AllToAllEP  # noqa: F401
    except ImportError:
        return False
    return True


class NativeLayer:
    """A layer's experts on their owners, run by ``AllToAllEP`` over ``grouped_mm``.

    Args:
        weights: This rank's gate/up ``[E', 2I, H]`` and down ``[E', H, I]``.
        top_k: K.

    Raises:
        ValueError: The installed Transformers has none.
    """

    def __init__(self, weights: list[torch.Tensor], top_k: int) -> None:
        if not is_available():
            raise ValueError(f"contender hf_a2a needs {NEEDS}")
        from transformers.distributed.expert_parallel import AllToAllEP

        self.parameters = [nn.Parameter(weight.detach()) for weight in weights]
        experts = _experts(self.parameters, top_k)
        mesh = init_device_mesh(weights[0].device.type, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
        self._run = AllToAllEP(experts, mesh["ep"], mesh["tp"])

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` from tokens ``[T, H]``, global choices ``[T, K]`` and weights ``[T, K]``."""
        return self._run(hidden, index, gates)


def _experts(parameters: list[nn.Parameter], top_k: int) -> Any:
    """A Qwen3-MoE experts module over these very parameters."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    up, down = parameters
    config = Qwen3MoeConfig(
        hidden_size=down.shape[1],
        moe_intermediate_size=down.shape[2],
        num_experts=len(down),
        num_experts_per_tok=top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = up, down
    experts._is_expert_parallel = True
    return experts
