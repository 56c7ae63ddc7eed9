"""Routing scenarios by name: ``balanced``, ``R:h`` (R% of each rank's tokens go to h hot experts), ``zipf``."""

from __future__ import annotations

import torch


def routing(name: str, tokens: int, experts: int, top_k: int, rank: int, device: torch.device) -> torch.Tensor:
    """Choices of one rank's tokens.

    Args:
        name: The scenario.
        tokens: T.
        experts: E.
        top_k: K.
        rank: This rank; ranks differ in order, and balanced ones in where they start.
        device: Where the result is.

    Returns:
        int64 ``[T, K]``, no expert twice for one token.

    Raises:
        ValueError: The scenario is unknown, or impossible for these sizes.
    """
    generator = torch.Generator().manual_seed(rank)
    if name == "zipf":
        popularity = 1.0 / torch.arange(1, experts + 1)
        chosen = torch.multinomial(popularity.expand(tokens, experts), top_k, generator=generator)
    else:
        chosen = _cyclic(torch.arange(tokens) + rank * tokens, experts, top_k)
        if name != "balanced":
            share, hot = _hot(name, experts, top_k)
            chosen = hot + _cyclic(torch.arange(tokens) + rank * tokens, experts - hot, top_k)
            many = round(tokens * share)
            chosen[:many] = _cyclic(torch.arange(many), hot, top_k)
    return chosen[torch.randperm(tokens, generator=generator)].to(device)


def _cyclic(token: torch.Tensor, experts: int, top_k: int) -> torch.Tensor:
    return (token.unsqueeze(1) * top_k + torch.arange(top_k)) % experts


def _hot(name: str, experts: int, top_k: int) -> tuple[float, int]:
    try:
        share, hot = (int(part) for part in name.split(":"))
    except ValueError:
        raise ValueError(f"routing {name!r} is not balanced, zipf or R:h, such as 80:4") from None
    if not (0 <= share <= 100 and top_k <= hot <= experts - top_k):
        raise ValueError(
            f"routing {name!r} needs 0 <= R <= 100 and {top_k} <= h <= {experts - top_k} (top-{top_k} of {experts})"
        )
    return share / 100, hot
