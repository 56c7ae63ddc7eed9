"""Routing as a case wants it, on the patched and the unpatched model alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.engine.cases import batch_of, loss_of


class Steered:
    """Sends each rank's tokens to experts of the case's choice; routing weights stay the router's.

    Args:
        model: Patched or not.
        experts: Per rank, the experts that its tokens take in turns; as many as top-k divides, or more.
    """

    def __init__(self, model: nn.Module, experts: Sequence[Sequence[int]]) -> None:
        self.model, self.experts = model, experts
        self.rank = dist.get_rank()
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self._steer)

    def _steer(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = args
        chosen = torch.tensor(self.experts[self.rank % len(self.experts)])
        places = torch.arange(index.numel()) % len(chosen)
        return hidden, chosen[places].view(index.shape), weights

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """The mean of all ranks' gradients, by the unpatched model on this process."""
        assert self.model is not None
        self.model.zero_grad()
        for self.rank in range(dist.get_world_size()):
            (loss_of(self.model, batch_of(self.rank, step)) / dist.get_world_size()).backward()
        self.rank = dist.get_rank()
        named = self.model.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
