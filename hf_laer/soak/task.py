"""What a soak trains: a tiny model, batches whose tokens drift, and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

VOCABULARY = 61
# The strategy of a soak whose model is not patched: what the stack itself does over a long run.
UNPATCHED = "none"
# Far above rounding: AdamW's first steps are nearly the gradient's sign, and a gradient that is all rounding must not
# move a weight by a whole learning rate.
EPSILON = 1e-4
LEARNING_RATE = 1e-3
CLIP = 1.0


@dataclass(frozen=True)
class Settings:
    """A soak.

    Args:
        strategy: How experts run; ``none`` leaves the model unpatched.
        steps: Optimizer steps in all.
        ranks: Processes; every second part runs on half of them.
        part: Steps between resumes.
        check: Steps between comparisons with the shadow.
        evaluate: Steps between evaluations.
        seed: Of weights and data.

    Raises:
        ValueError: Something is not positive.
    """

    strategy: str = "llep"
    steps: int = 2000
    ranks: int = 4
    part: int = 500
    check: int = 50
    evaluate: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "ranks", "part", "check", "evaluate"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")

    @property
    def streams(self) -> int:
        """Micro-batches of one step, over all ranks; so many whatever the ranks."""
        return 2 * math.lcm(self.ranks, self.fewer)

    @property
    def fewer(self) -> int:
        """Ranks of every second part."""
        return max(1, self.ranks // 2)

    def parts(self) -> list[tuple[int, int, int]]:
        """First step, one past the last, and ranks of each part."""
        starts = range(0, self.steps, self.part)
        return [
            (start, min(start + self.part, self.steps), self.fewer if number % 2 else self.ranks)
            for number, start in enumerate(starts)
        ]


def tiny_model(seed: int) -> nn.Module:
    """A small Qwen3-MoE in float32 whose routers prefer some experts; the sizes divide nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=34,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=18,
        moe_intermediate_size=25,
        intermediate_size=50,
        num_experts=9,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("gate.weight") else 0.05))
    return model.train()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.01)


def batch(settings: Settings, step: int, stream: int) -> torch.Tensor:
    """int64 ``[B, L]``: tokens around a place in the vocabulary that wanders from step to step, as does the routing.

    Args:
        settings: Seed and length of the walk.
        step: Which step; -1 is the evaluation's.
        stream: Which of the step's micro-batches; they differ in shape.
    """
    generator = torch.Generator().manual_seed(settings.seed * 7_919 + 1_000_003 * (step + 1) + stream)
    rows, length = 1 + stream % 2, 4 + int(torch.randint(0, 9, (), generator=generator))
    middle = _walk(settings.seed, settings.steps)[step] + 3 * (stream % 3)
    spread = 4 * torch.randn(rows, length, generator=generator)
    return (middle + spread).round().long() % VOCABULARY


@lru_cache(maxsize=4)
def _walk(seed: int, steps: int) -> torch.Tensor:
    return torch.randn(steps + 1, generator=torch.Generator().manual_seed(seed)).cumsum(0)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def step_shadow(model: nn.Module, settings: Settings, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradients of one whole step by an unpatched model on one process: its mean loss, and the gradients by name."""
    model.zero_grad()
    total = 0.0
    for stream in range(settings.streams):
        loss = loss_of(model, batch(settings, step, stream)) / settings.streams
        loss.backward()
        total += loss.item()
    return total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def plain_losses(settings: Settings) -> list[float]:
    """Each step's mean loss of the unpatched run."""
    model = tiny_model(settings.seed)
    optimizer, losses = optimizer_of(model), []
    for step in range(settings.steps):
        loss, gradients = step_shadow(model, settings, step)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss)
    return losses
