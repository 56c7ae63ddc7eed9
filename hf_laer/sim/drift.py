"""Made-up loads that drift as a router's do: for comparing planners where no trace has been recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Drift:
    """How popular experts are and how that changes from step to step.

    The logit of expert e at step t is ``sigma * (sqrt(1 - w) * z[t, e] + sqrt(w) * b[d(t), e]) + h[t, e]``:

    - ``z`` is a stationary AR(1) process of unit variance,
      ``z[t] = rho * z[t-1] + sqrt(1 - rho**2) * noise``;
    - ``b`` is one standard normal profile per domain, ``w`` (``domain_weight``) its share of the variance;
      the domain changes, in turn, every ``domain_steps`` steps (0: never, and then ``w`` counts as 0);
    - ``h`` adds ``hot_boost`` to ``hot_experts`` random experts, drawn anew every ``hot_steps`` steps.

    Each rank adds its own normal noise of ``rank_sigma`` to the logits of each step. Popularities are their
    softmax, no expert's above ``1 / top_k`` (a token picks it at most once); the loads of a rank are one
    multinomial draw of ``tokens * top_k``. All is drawn from ``numpy.random.default_rng((seed, layer))``.

    Args:
        ranks: N.
        experts: E.
        top_k: K.
        tokens: Tokens per rank and step.
        sigma: Standard deviation of the logits: 0 is even routing.
        rho: Correlation from one step to the next, 0 to 1.
        rank_sigma: Standard deviation of what a rank adds.
        domains: Number of domain profiles.
        domain_steps: Steps between domain switches, 0 for none.
        domain_weight: Share of the logits' variance that is the domain's.
        hot_experts: Experts that are hot at a time.
        hot_boost: What a hot expert's logit gains.
        hot_steps: Steps that the same experts stay hot.
        seed: Any whole number from 0.

    Raises:
        ValueError: A size below 1, ``top_k`` above ``experts``, or a share outside 0 to 1.
    """

    ranks: int
    experts: int
    top_k: int
    tokens: int = 8192
    sigma: float = 1.0
    rho: float = 0.9
    rank_sigma: float = 0.2
    domains: int = 3
    domain_steps: int = 0
    domain_weight: float = 0.5
    hot_experts: int = 0
    hot_boost: float = 2.0
    hot_steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "top_k", "tokens", "domains", "hot_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.top_k > self.experts or self.hot_experts > self.experts:
            raise ValueError(
                f"top_k={self.top_k}, hot_experts={self.hot_experts} must not exceed {self.experts} experts"
            )
        if not (0 <= self.rho <= 1 and 0 <= self.domain_weight <= 1):
            raise ValueError(f"rho={self.rho} and domain_weight={self.domain_weight} must lie in 0..1")

    def loads(self, steps: int, layer: int = 0) -> np.ndarray:
        """int64 ``[steps, N, E]``: one layer's loads."""
        rng = np.random.default_rng((self.seed, layer))
        logits = self._logits(steps, rng)
        out = np.empty((steps, self.ranks, self.experts), np.int64)
        for step in range(steps):
            own = logits[step] + self.rank_sigma * rng.standard_normal((self.ranks, self.experts))
            out[step] = rng.multinomial(self.tokens * self.top_k, _popularity(own, self.top_k))
        return out

    def _logits(self, steps: int, rng: np.random.Generator) -> np.ndarray:
        weight = self.domain_weight if self.domain_steps else 0.0
        profiles = rng.standard_normal((self.domains, self.experts))
        state = rng.standard_normal(self.experts)
        logits = np.empty((steps, self.experts))
        hot = np.zeros(self.experts)
        for step in range(steps):
            if step > 0:
                noise = rng.standard_normal(self.experts)
                state = self.rho * state + math.sqrt(1 - self.rho**2) * noise
            domain = step // self.domain_steps % self.domains if self.domain_steps else 0
            if self.hot_experts and step % self.hot_steps == 0:
                hot = np.zeros(self.experts)
                hot[rng.choice(self.experts, self.hot_experts, replace=False)] = self.hot_boost
            mixed = math.sqrt(1 - weight) * state + math.sqrt(weight) * profiles[domain]
            logits[step] = self.sigma * mixed + hot
        return logits


# Sigmas at which the static FSDP + EP layout on 32 ranks (4 x 8) shows 1.5 to 1.8 max/mean.
PRESETS: dict[str, Drift] = {
    "8e-top2": Drift(ranks=32, experts=8, top_k=2, sigma=0.7),
    "16e-top4": Drift(ranks=32, experts=16, top_k=4, sigma=0.93),
    "128e-top8": Drift(ranks=32, experts=128, top_k=8, sigma=0.88),
}
PRESET_SLOTS = {"8e-top2": 2, "16e-top4": 4, "128e-top8": 8}


def _popularity(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Softmax ``[N, E]`` with no share above ``1 / top_k``; the excess goes to the others in proportion."""
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    limit = 1.0 / top_k
    capped = np.zeros(share.shape, bool)
    while (share > limit * (1 + 1e-12)).any():
        capped |= share >= limit
        free = np.where(capped, 0.0, share)
        left = 1 - limit * capped.sum(axis=1, keepdims=True)
        share = np.where(capped, limit, free * (left / np.maximum(free.sum(axis=1, keepdims=True), 1e-300)))
    return share / share.sum(axis=1, keepdims=True)
