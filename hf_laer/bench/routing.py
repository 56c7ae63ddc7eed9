"""Routing scenarios by name, the same at every step or another one at each.

- ``balanced``: experts take turns, so that a token's are neighbours, which mostly one rank has;
- ``uniform``: a token's experts are drawn from all alike, so that it goes to several ranks;
- ``R:h``: R% of each rank's tokens go to h hot experts;
- ``choices:R:h``: R% of each rank's choices do; with h below K a token then names an expert more than once, as it must
  in LLEP's published figures for one hot expert of a top-4 layer;
- ``zipf``;
- ``drift:RHO``, ``drift:RHO:SIGMA``: popularities that wander (:mod:`hf_laer.sim.drift`), with correlation RHO from one
  step to the next;
- ``trace:FILE``: recorded loads (:mod:`hf_laer.sim.trace`), step by step.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_laer.sim.drift import Drift
from hf_laer.sim.trace import Trace, load_trace

KNOWN = "balanced, uniform, zipf, R:h, choices:R:h, drift:RHO, trace:FILE"


def changes(name: str) -> bool:
    """Whether loads change from step to step in a scenario."""
    return name.startswith(("drift:", "trace:"))


def routings(
    name: str,
    sizes: tuple[int, int, int],
    rank: int,
    ranks: int,
    device: torch.device,
    steps: int,
    layer: int = 0,
) -> list[torch.Tensor]:
    """Choices of one rank's tokens at each of ``steps`` steps; one for all where the scenario does not change.

    Args:
        name: The scenario.
        sizes: T, E, K.
        rank: This rank.
        ranks: N.
        device: Where the results are.
        steps: How many are wanted.
        layer: Layers have loads of their own where these change.

    Returns:
        int64 ``[T, K]`` each.

    Raises:
        ValueError: The scenario is unknown, or impossible for these sizes, or its file is no trace.
        OSError: Its file cannot be opened.
    """
    tokens, experts, top_k = sizes
    if not changes(name):
        return [routing(name, tokens, experts, top_k, rank, device)]
    loads = _drifting(name, sizes, ranks, steps, layer) if name.startswith("drift:") else None
    if loads is None:
        loads = recorded(load_trace(name.removeprefix("trace:")), sizes, ranks, steps, layer)
    generator = torch.Generator().manual_seed(rank)
    return [of_counts(own, tokens, top_k, generator).to(device) for own in loads[:, rank]]


def routing(name: str, tokens: int, experts: int, top_k: int, rank: int, device: torch.device) -> torch.Tensor:
    """Choices of one rank's tokens, in a scenario that does not change.

    Args:
        name: The scenario.
        tokens: T.
        experts: E.
        top_k: K.
        rank: This rank; ranks differ in order, and balanced ones in where they start.
        device: Where the result is.

    Returns:
        int64 ``[T, K]``, no expert twice for one token but in ``choices:R:h``.

    Raises:
        ValueError: The scenario is unknown, or impossible for these sizes.
    """
    generator = torch.Generator().manual_seed(rank)
    if name in ("uniform", "zipf"):
        popularity = 1.0 / torch.arange(1, experts + 1) if name == "zipf" else torch.ones(experts)
        chosen = torch.multinomial(popularity.expand(tokens, experts), top_k, generator=generator)
    else:
        chosen = _cyclic(torch.arange(tokens) + rank * tokens, experts, top_k)
        if name != "balanced":
            share, hot = _hot(name, experts, top_k)
            chosen = hot + _cyclic(torch.arange(tokens) + rank * tokens, experts - hot, top_k)
            many = round(tokens * share)
            chosen[:many] = _cyclic(torch.arange(many), hot, top_k)
    return chosen[torch.randperm(tokens, generator=generator)].to(device)


def of_counts(counts: np.ndarray, tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Choices int64 ``[T, K]`` that name each expert so often, none twice for one token.

    Args:
        counts: int64 ``[E]``, ``T * K`` in all; what an expert has beyond T goes to those with least.
        tokens: T.
        top_k: K.
        generator: Of the tokens' order.
    """
    counts = _at_most(np.array(counts, np.int64), tokens)
    # An expert's choices are consecutive, at most T of them: T apart, so in one token's column, none comes twice.
    flat = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return flat.view(top_k, tokens).t()[torch.randperm(tokens, generator=generator)].contiguous()


def recorded(trace: Trace, sizes: tuple[int, int, int], ranks: int, steps: int, layer: int) -> np.ndarray:
    """Loads int64 ``[steps, N, E]`` in the proportions of a trace.

    Where it has fewer experts than E, those of the layers that follow are added; where it has more, the first E stay.
    Steps start over at the end.
    """
    tokens, experts, top_k = sizes
    wanted = -(-experts // trace.experts)
    parts = [trace.layer((layer * wanted + at) % trace.layers, ranks) for at in range(wanted)]
    loads = np.concatenate(parts, axis=-1)[np.arange(steps) % trace.steps, :, :experts]
    return np.array([[_scaled(own, tokens * top_k) for own in step] for step in loads], np.int64)


def _drifting(name: str, sizes: tuple[int, int, int], ranks: int, steps: int, layer: int) -> np.ndarray:
    tokens, experts, top_k = sizes
    try:
        rho, sigma = (*map(float, name.split(":")[1:]), Drift.sigma)[:2]
    except ValueError:
        raise ValueError(f"routing {name!r} is not drift:RHO or drift:RHO:SIGMA, such as drift:0.9") from None
    drift = Drift(ranks=ranks, experts=experts, top_k=top_k, tokens=tokens, rho=rho, sigma=sigma)
    return drift.loads(steps, layer)


def _scaled(loads: np.ndarray, total: int) -> np.ndarray:
    """``loads`` in the same proportions, ``total`` in all; even where there were none."""
    loads = loads if loads.any() else np.ones_like(loads)
    down = loads * total // loads.sum()
    remainders = loads * total % loads.sum()
    down[np.argsort(-remainders, kind="stable")[: total - int(down.sum())]] += 1
    return down


def _at_most(counts: np.ndarray, most: int) -> np.ndarray:
    """What exceeds ``most`` moves to the least loaded."""
    beyond = int(np.maximum(counts - most, 0).sum())
    counts = np.minimum(counts, most)
    for expert in np.argsort(counts, kind="stable"):
        moved = min(beyond, most - int(counts[expert]))
        counts[expert] += moved
        beyond -= moved
    return counts


def _cyclic(token: torch.Tensor, experts: int, top_k: int) -> torch.Tensor:
    return (token.unsqueeze(1) * top_k + torch.arange(top_k)) % experts


def _hot(name: str, experts: int, top_k: int) -> tuple[float, int]:
    try:
        share, hot = (int(part) for part in name.removeprefix("choices:").split(":"))
    except ValueError:
        raise ValueError(f"routing {name!r} is none of {KNOWN}, such as 80:4") from None
    least = 1 if name.startswith("choices:") else top_k
    if not (0 <= share <= 100 and least <= hot <= experts - top_k):
        raise ValueError(
            f"routing {name!r} needs 0 <= R <= 100 and {least} <= h <= {experts - top_k} (top-{top_k} of {experts})"
        )
    return share / 100, hot
