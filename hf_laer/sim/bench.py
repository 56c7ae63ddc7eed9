"""How good and how fast the planners are, against what is published and what no plan can better."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hf_laer import plan as planners
from hf_laer.plan import EMPTY, Placement, Plan, imbalance
from hf_laer.plan.forecast import Forecaster
from hf_laer.plan.replicas import RECENT

from .drift import PRESET_SLOTS, PRESETS, Drift
from .oracle import lowest_maximum

RANKS, WIDTH = 32, 8
# Steps that the engine forecasts from, unless it is told otherwise.
HISTORY = 8
# Beside alpha = 1: ranks may hold a tenth more than the mean before the union fetches an expert.
TOLERANT = 1.1

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
    step's layout, even split), ``exact`` (the engine's layout, see :func:`_layouts`, exact split), ``fsep+llep``,
    ``now`` (this step's layout, exact split), ``llep``, ``extra weights`` (slots that ``fsep+llep`` adds, as a
    share of the placement's), ``over HiGHS`` (maximum of ``exact`` over the linear programme's on the same
    placement, the worst). LLEP's m is 4% of the mean load.
    """
    rows = []
    for name, label, drift in _drifts():
        seen, worst = _seen(drift, steps, layers, _drift_plans, PRESET_SLOTS[name]), 0.0
        row: dict[str, float | str] = {"experts, top-k, slots": name, "rho": label}
        row |= {column: float(np.mean([imbalance(plan.rank_loads) for plan in seen[column]])) for column in seen}
        added = [_filled(spilled) / _filled(exact) - 1 for spilled, exact in _pairs(seen, "fsep+llep", "exact")]
        row["extra weights"] = float(np.mean(added))
        if oracle:
            for plan in seen["exact"]:
                totals = np.bincount(_expert_of(plan), plan.split.quotas(), drift.experts).astype(np.int64)
                worst = max(worst, float(plan.rank_loads.max()) / lowest_maximum(totals, plan.placement))
            row["over HiGHS"] = worst
        rows.append(row)
    return rows


def method_table(steps: int = 30, layers: int = 2, sizes: Sequence[int] = (8, RANKS)) -> list[dict[str, float | str]]:
    """What each method makes of drifting loads: max/mean over ranks, in the mean and the 95th percentile over steps.

    On ``sizes`` ranks in nodes of 8, for the presets and drifts of :func:`drift_table`; slots as there, or a quarter
    more than an even share where that is more. ``lower bound``: no plan has a lower maximum. ``exposed``: expert
    weights that ``fsep+llep`` fetches once the loads are known, which delay the forward, over those that ``llep``
    fetches; what was placed ahead is not among them. ``whole``: ``fsep+llep`` with experts that live with an owner, the
    same of it, and its replicas per rank, of which each takes the way that ``sharded`` slots all take. ``1.1``: both
    with a capacity factor of :data:`TOLERANT`, ``llep`` without.
    """
    rows = []
    for ranks in sizes:
        for name, label, drift in _drifts(ranks):
            slots = max(PRESET_SLOTS[name], -(-5 * drift.experts // (4 * ranks)))
            seen = _seen(drift, steps, layers, _method_plans, slots)
            row: dict[str, float | str] = {"experts, top-k": name, "ranks x slots": f"{ranks} x {slots}", "rho": label}
            for method, plans in seen.items():
                values = [imbalance(plan.rank_loads) for plan in plans]
                row[method], row[f"{method} p95"] = float(np.mean(values)), float(np.percentile(values, 95))
            loads = [int(plan.rank_loads.sum()) for plan in seen["ep"]]
            row["lower bound"] = float(np.mean([-(-total // ranks) * ranks / total for total in loads]))
            fetched = max(sum(_filled(theirs) - drift.experts for theirs in seen["llep"]), 1)
            for ours, placed in (("fsep+llep", "fsep"), ("whole", "foreseen")):
                for one in (ours, f"{ours} 1.1"):
                    late = sum(_filled(plan) - _filled(ahead) for plan, ahead in _pairs(seen, one, placed))
                    row[f"{one} exposed"] = late / fetched
            del row["foreseen"], row["foreseen p95"]
            row["replicas"] = float(np.mean([_filled(plan) - drift.experts for plan in seen["foreseen"]])) / ranks
            rows.append(row)
    return rows


def _drifts(ranks: int = RANKS) -> Iterator[tuple[str, str, Drift]]:
    """Preset, name of the drift, and the drift, on ``ranks`` ranks."""
    changes: dict[str, dict[str, Any]] = {
        "0.99": {"rho": 0.99},
        "0.9": {},
        "0.5": {"rho": 0.5},
        "0.9, switches": {"domain_steps": 8},
    }
    for name, preset in PRESETS.items():
        for label, change in changes.items():
            yield name, label, dataclasses.replace(preset, ranks=ranks, **change)


def _seen(
    drift: Drift, steps: int, layers: int, plans_of: Callable[..., dict[str, Plan]], slots: int
) -> dict[str, list[Plan]]:
    """Every column's plans, those of the first five steps left out."""
    seen: dict[str, list[Plan]] = {}
    for layer in range(layers):
        loads = drift.loads(steps, layer)
        for step, *placements in _layouts(loads, slots):
            if step >= 5:
                for column, plan in plans_of(loads, step, slots, *placements).items():
                    seen.setdefault(column, []).append(plan)
    return seen


def _layouts(loads: np.ndarray, slots: int) -> Iterator[tuple[int, Placement, Placement]]:
    """Step, and placements of slices and of owners with replicas, as the engine's tuner makes them: from the forecast
    that has missed by least so far.

    Known in time for the next step. (These loads always move, so the tuner never keeps a layout for being level.)
    """
    ranks, experts = loads.shape[1:]
    forecaster, placement = Forecaster(HISTORY), planners.initial_placement(experts, ranks, slots)
    owners = planners.chunk_owners(experts, ranks)
    replicas = planners.replica_placement(loads[0, 0] * 0, owners, ranks, slots)
    for step, now in enumerate(loads):
        yield step, placement, replicas
        forecaster.observe(now.sum(axis=0, keepdims=True))
        expected, hedge = forecaster.expected()[0], forecaster.hedge
        placement = planners.fsep_placement(expected, ranks, slots, WIDTH, hedge_permille=hedge)
        recent = [one[0] for one in list(forecaster.history)[: -RECENT - 1 : -1]]
        told: dict[str, Any] = {"recent": recent, "min_tokens_per_gemm": _least(now), "hedge_permille": hedge}
        replicas = planners.replica_placement(expected, owners, ranks, slots, WIDTH, **told)


def _least(loads: np.ndarray) -> int:
    """m: 4% of the mean load."""
    return max(1, int(loads.sum()) * 4 // (len(loads) * 100))


def _drift_plans(
    loads: np.ndarray, step: int, slots: int, placement: Placement, replicas: Placement
) -> dict[str, Plan]:
    now, ranks = loads[step], loads.shape[1]
    plain = planners.laer_placement(loads[step - 1], ranks, slots, WIDTH, candidates=1)
    methods = _method_plans(loads, step, slots, placement, replicas)
    return {
        "static": planners.fsdp_ep(now, slots),
        "laer": methods["laer"],
        "even": planners.eplb(now, plain),
        "exact": methods["fsep"],
        "fsep+llep": methods["fsep+llep"],
        "now": planners.fsep(now, planners.fsep_placement(now, ranks, slots, WIDTH), WIDTH),
        "llep": methods["llep"],
    }


def _method_plans(
    loads: np.ndarray, step: int, slots: int, placement: Placement, replicas: Placement
) -> dict[str, Plan]:
    now, (_, ranks, experts) = loads[step], loads.shape
    recent = planners.laer_placement(loads[step - 5 : step].sum(axis=0), ranks, slots, WIDTH)
    least, owners = _least(now), planners.chunk_owners(experts, ranks)
    sharded = partial(planners.fsep_llep, now, placement, WIDTH, min_tokens_per_gemm=least)
    whole = partial(planners.llep_ahead, now, owners, replicas, min_tokens_per_gemm=least, ranks_per_node=WIDTH)
    return {
        "ep": planners.ep(now, owners),
        "llep": planners.llep(now, owners, min_tokens_per_gemm=least, imbalance_threshold=1.0, ranks_per_node=WIDTH),
        "laer": planners.laer(now, recent, WIDTH),
        "fsep": planners.fsep(now, placement, WIDTH),
        "fsep+llep": sharded(),
        "fsep+llep 1.1": sharded(capacity_factor=TOLERANT),
        "foreseen": planners.fsep(now, replicas, WIDTH),
        "whole": whole(),
        "whole 1.1": whole(capacity_factor=TOLERANT),
    }


def _pairs(seen: dict[str, list[Plan]], one: str, other: str) -> Iterator[tuple[Plan, Plan]]:
    return zip(seen[one], seen[other], strict=True)


def _filled(plan: Plan) -> int:
    """Experts in all slots of all ranks."""
    return int((plan.placement.slots != EMPTY).sum())


def _expert_of(plan: Plan) -> np.ndarray:
    """int64 ``[R]``: each range's expert."""
    return np.repeat(np.arange(plan.split.num_experts), np.diff(plan.split.first))


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
