"""How good and how fast the planners are, against what is published and what no plan can better."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from hf_laer import plan as planners
from hf_laer.plan import EMPTY, Plan, imbalance

from .drift import PRESET_SLOTS, PRESETS, Drift
from .oracle import lowest_maximum

RANKS, WIDTH = 32, 8

# What was published or asked for, in seconds on one core.
TARGETS = {
    "llep, 384 experts x 8 ranks": 100e-6,
    "llep, 384 experts x 64 ranks": 1e-3,
    "exact split, 128 experts x 64 ranks": 200e-6,
    "exact split, 128 experts x 64 ranks, 4 slots": 200e-6,
    "exact split, 128 experts x 64 ranks, 8 slots": 200e-6,
    "laer layout, 6 candidates, 64 ranks": 0.3e-3,
    "laer layout, 6 candidates, 256 ranks": 2e-3,
    "laer layout, 6 candidates, 1024 ranks": 20e-3,
}


def drift_table(steps: int = 30, layers: int = 2, *, oracle: bool = True) -> list[dict[str, float | str]]:
    """Mean max/mean over ranks on drifting loads, 32 ranks in nodes of 8, one row per preset and drift.

    Columns: ``static`` (FSDP + EP), ``laer`` (sum of five steps, own-node-first even split), ``even`` (last
    step's layout, even split), ``exact`` (last step's hedged layout, exact split), ``fsep+llep``, ``now``
    (this step's layout, exact split), ``llep``, ``extra weights`` (slots that ``fsep+llep`` adds, as a share
    of the placement's), ``over HiGHS`` (maximum of ``exact`` over the linear programme's on the same
    placement, the worst). LLEP's m is 4% of the mean load.
    """
    rows = []
    for name, preset in PRESETS.items():
        for label, change in (("0.9", {}), ("0.5", {"rho": 0.5}), ("0.9, switches", {"domain_steps": 8})):
            rows.append(_drift_row(name, label, dataclasses.replace(preset, **change), steps, layers, oracle))
    return rows


def _drift_row(name: str, label: str, drift: Drift, steps: int, layers: int, oracle: bool) -> dict[str, float | str]:
    seen: dict[str, list[float]] = {}
    worst = 0.0
    for layer in range(layers):
        loads = drift.loads(steps, layer)
        for step in range(5, steps):
            plans = _drift_plans(loads, step, PRESET_SLOTS[name], drift)
            for column, plan in plans.items():
                seen.setdefault(column, []).append(imbalance(plan.rank_loads))
            placed, spilled = ((plans[n].placement.slots != EMPTY).sum() for n in ("exact", "fsep+llep"))
            seen.setdefault("extra weights", []).append(float(spilled / placed - 1))
            if oracle:
                exact = plans["exact"]
                best = lowest_maximum(loads[step].sum(axis=0), exact.placement)
                worst = max(worst, float(exact.rank_loads.max()) / best)
    row: dict[str, float | str] = {"experts, top-k, slots": name, "rho": label}
    row |= {column: float(np.mean(values)) for column, values in seen.items()}
    return row | ({"over HiGHS": worst} if oracle else {})


def _drift_plans(loads: np.ndarray, step: int, slots: int, drift: Drift) -> dict[str, Plan]:
    now = loads[step]
    recent = planners.laer_placement(loads[step - 5 : step].sum(axis=0), RANKS, slots, WIDTH)
    last = planners.fsep_placement(loads[step - 1], RANKS, slots, WIDTH)
    plain = planners.laer_placement(loads[step - 1], RANKS, slots, WIDTH, candidates=1)
    least = max(1, int(now.sum()) * 4 // (RANKS * 100))
    owners = planners.chunk_owners(drift.experts, RANKS)
    return {
        "static": planners.fsdp_ep(now, slots),
        "laer": planners.laer(now, recent, WIDTH),
        "even": planners.eplb(now, plain),
        "exact": planners.fsep(now, last, WIDTH),
        "fsep+llep": planners.fsep_llep(now, last, WIDTH, min_tokens_per_gemm=least),
        "now": planners.fsep(now, planners.fsep_placement(now, RANKS, slots, WIDTH), WIDTH),
        "llep": planners.llep(now, owners, min_tokens_per_gemm=least, imbalance_threshold=1.0, ranks_per_node=WIDTH),
    }


def skewed(ranks: int, experts: int, tokens: int = 32768, seed: int = 0) -> np.ndarray:
    """int64 ``[N, E]``: a fixed skewed draw (normal logits of deviation 1) for timing."""
    rng = np.random.default_rng(seed)
    share = np.exp(rng.standard_normal(experts))
    return rng.multinomial(tokens, share / share.sum(), size=ranks).astype(np.int64)


def timings(repeats: int = 50) -> dict[str, tuple[float, float]]:
    """Median and least CPU seconds of one plan on this thread, for every name in ``TARGETS``, code warm.

    On a machine that does other work too, the least is what the plan costs and the median what it costs there.
    """
    out = {}
    for ranks in (8, 64):
        loads, owners = skewed(ranks, 384), planners.chunk_owners(384, ranks)
        call = partial(planners.llep, loads, owners, imbalance_threshold=1.0)
        out[f"llep, 384 experts x {ranks} ranks"] = _timed(call, repeats)
    loads = skewed(64, 128)
    # A layout made half of other loads; a quarter more slots than an even share, as the configuration has it.
    stale = planners.fsep_placement(skewed(64, 128, seed=1) + loads, 64, 3, 8)
    split = partial(planners.exact_split, loads, stale, 8)
    out["exact split, 128 experts x 64 ranks"] = _timed(split, repeats)
    for slots in (4, 8):
        stale = planners.fsep_placement(skewed(64, 128, seed=1) + loads, 64, slots, 8)
        split = partial(planners.exact_split, loads, stale, 8)
        out[f"exact split, 128 experts x 64 ranks, {slots} slots"] = _timed(split, repeats)
    for ranks in (64, 256, 1024):
        place = partial(planners.laer_placement, skewed(ranks, 32), ranks, 4, 8)
        out[f"laer layout, 6 candidates, {ranks} ranks"] = _timed(place, repeats)
    return out


def _timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    call()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return float(np.median(times)), min(times)


def compile_seconds() -> float:
    """Wall time to compile the engine's planners, or to load them where they are cached."""
    start = time.perf_counter()
    planners.compile_kernels()
    return time.perf_counter() - start
