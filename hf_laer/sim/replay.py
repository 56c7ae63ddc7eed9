"""Replays a trace through a method with the staleness that the method really has."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from hf_laer.plan import EMPTY, Placement, Plan, Prediction, imbalance, lower_bound, predict, used
from hf_laer.plan.forecast import Forecaster
from hf_laer.plan.replicas import RECENT

from .methods import Method, Setting, get_method, grouped
from .trace import Trace

METRICS = (
    "imbalance",
    "seconds",
    "compute",
    "exchange",
    "weights_exposed",
    "weights_hidden",
    "ideal",
    "peak_bytes",
    "weight_slots",
    "late",
    "spilled",
    "foreign",
    "moved",
    "regret",
)


@dataclass(frozen=True, eq=False)
class Replay:
    """What one method would have done.

    Args:
        name: The method.
        values: By metric (see ``METRICS``), float64 ``[steps, layers]``. Times are seconds per layer and
            micro-batch; ``ideal`` is the force-balanced run's; ``peak_bytes`` the fullest rank's;
            ``weight_slots`` experts unsharded or fetched over all ranks; ``late`` those of them that were fetched once
            the loads were known; ``spilled`` and ``foreign`` token
            assignments; ``moved`` experts that changed home for good; ``regret`` seconds lost to staleness (0
            where it was not asked for).
        rank_loads: int64 ``[steps, N]``, tokens per rank of layer 0.
    """

    name: str
    values: dict[str, np.ndarray]
    rank_loads: np.ndarray

    def mean(self, metric: str) -> float:
        """The mean over steps and layers."""
        return float(self.values[metric].mean())

    def percentile(self, metric: str, percent: float) -> float:
        """A percentile over steps and layers."""
        return float(np.percentile(self.values[metric], percent))

    @property
    def of_ideal(self) -> float:
        """The force-balanced run's time over this one's: 1.0 is as good as an even router."""
        seconds = self.values["seconds"].sum()
        return float(self.values["ideal"].sum() / seconds) if seconds > 0 else 1.0


def replay(
    trace: Trace,
    name: str,
    setting: Setting,
    *,
    warmup: int = 5,
    layers: Sequence[int] | None = None,
    threads: int = 2,
    with_regret: bool = False,
) -> Replay:
    """Runs method ``name`` over ``trace``, re-grouped to the setting's ranks; layers are independent.

    Args:
        trace: The loads.
        name: A method of ``METHODS``, or ``lower_bound``.
        setting: What is held fixed.
        warmup: Steps at the start that are run but not counted, so that methods have seen some history; fewer
            where the trace is short.
        layers: The layers to replay; ``None`` means all.
        threads: Layers at a time.
        with_regret: Also plan from this step's loads, and count what staleness costs.

    Raises:
        ValueError: Unknown method, or the trace's experts are not the setting's.
    """
    if trace.experts != setting.experts:
        raise ValueError(f"the trace has {trace.experts} experts, the setting {setting.experts}")
    method = None if name == "lower_bound" else get_method(name)
    if method is not None and setting.group is not None and setting.group < setting.ranks:
        method = grouped(method, setting)
    chosen = list(range(trace.layers)) if layers is None else list(layers)
    warmup = min(warmup, trace.steps - 1)

    def one(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return _replay_layer(trace.layer(layer, setting.ranks), method, setting, warmup, with_regret)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        done = list(pool.map(one, chosen))
    values = np.stack([rows for rows, _ in done], axis=1)
    return Replay(name, {metric: values[..., at] for at, metric in enumerate(METRICS)}, done[0][1])


def _replay_layer(
    loads: np.ndarray, method: Method | None, setting: Setting, warmup: int, with_regret: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Metrics ``[steps, len(METRICS)]`` and rank loads ``[steps, N]``."""
    state = method.start(setting) if method and method.start else None
    forecaster = Forecaster(setting.history, setting.forecast)
    rows, held = [], []
    moved, tokens, ideal = 0, -1, 0.0
    for step, now in enumerate(loads):
        if method is None:
            bound = lower_bound(now, setting.cost)
            even = np.full(setting.ranks, now.sum() // setting.ranks)
            plan, predicted = None, bound
        else:
            due = step > 0 and (method.every or step % setting.interval == 0)
            if due and method.place:
                if method.window is None:
                    recent = tuple(list(forecaster.history)[: -RECENT - 1 : -1])
                    seen, setting = forecaster.expected(), replace(setting, hedge=forecaster.hedge, recent=recent)
                else:
                    seen = loads[max(0, step - method.window(setting)) : step].sum(axis=0)
                before, state = state, method.place(seen, state, setting)
                moved = method.moved(before, state)
            plan = _costed(method, now, state, setting, moved if method.every or due else 0)
            if method.window is None:
                forecaster.observe(method.seen(now, setting))
            assert plan.predicted is not None
            predicted, even = plan.predicted, plan.rank_loads
        if step < warmup:
            continue
        if int(now.sum()) != tokens:  # mostly the same every step
            tokens, ideal = int(now.sum()), setting.ideal_seconds(now)
        regret = _regret(method, now, state, setting, predicted) if method and with_regret else 0.0
        late = 0 if plan is None or method is None else _late(method, plan, state, setting)
        rows.append(_row(plan, predicted, even, ideal, late, moved, regret))
        held.append(even)
    return np.array(rows), np.array(held)


def _costed(method: Method, now: np.ndarray, state: object, setting: Setting, moved: int) -> Plan:
    plan = method.plan(now, state, setting)
    owners = state if isinstance(state, np.ndarray) else setting.owners
    foreseen = used(state, plan) if method.foreseen and isinstance(state, Placement) else None
    return predict(plan, now, setting.cost, home=method.home, owners=owners, foreseen=foreseen, moved=float(moved))


def _late(method: Method, plan: Plan, state: object, setting: Setting) -> int:
    """Experts that ranks fetch for this plan and did not know of before."""
    if method.foreseen and isinstance(state, Placement):
        ahead = used(state, plan)
        return _filled(plan.placement) - (setting.experts if ahead is None else _filled(ahead))
    return _filled(plan.placement) - setting.experts if method.home in ("whole", "shadowed") else 0


def _filled(placement: Placement) -> int:
    return int((placement.slots != EMPTY).sum())


def _regret(method: Method, now: np.ndarray, state: object, setting: Setting, predicted: Prediction) -> float:
    """Seconds above those of the same method had it placed for this very step; negative where luck helped."""
    if method.place is None:
        return 0.0
    fresh = _costed(method, now, method.place(method.seen(now, setting), state, setting), setting, 0)
    assert fresh.predicted is not None
    return predicted.seconds - fresh.predicted.seconds


def _row(
    plan: Plan | None,
    predicted: Prediction,
    held: np.ndarray,
    ideal: float,
    late: int,
    moved: int,
    regret: float,
) -> list[float]:
    return [
        1.0 if plan is None else imbalance(held),
        predicted.seconds,
        predicted.compute_seconds,
        predicted.exchange_seconds,
        predicted.weights_exposed_seconds,
        predicted.weights_hidden_seconds,
        ideal,
        float(predicted.peak_bytes.max()),
        0.0 if plan is None else float(_filled(plan.placement)),
        float(late),
        0.0 if plan is None else float(plan.spilled),
        float(predicted.foreign_tokens),
        float(moved),
        regret,
    ]
