"""Every planner on the same loads, as the simulator drives it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hf_laer.plan import CostModel, Plan, Topology
from hf_laer.sim import METHODS, Setting


def every_plan(loads: np.ndarray, slots: int, width: int) -> dict[str, Plan]:
    """A plan for ``loads [N, E]`` by each method, placed for these very loads, with every spill that counts."""
    ranks, experts = loads.shape
    cost = CostModel(Topology(ranks, width), hidden=64, intermediate=48, top_k=1)
    setting = Setting(cost, experts, slots, min_tokens=1, threshold=1.0, guard=False)
    plans = {}
    for name, method in METHODS.items():
        state = method.start(setting) if method.start else None
        state = method.place(loads, state, setting) if method.place else state
        plans[name] = method.plan(loads, state, setting)
    return plans


def tied_and_drawn() -> list[np.ndarray]:
    """Loads full of ties: all alike, and drawn from few values."""
    return [np.full((8, 8), 5), np.random.default_rng(46).integers(0, 3, (8, 20))]


def digests(repeats: int, threads: int) -> list[str]:
    """The plans' hashes, once they are known to be the same in every repeat and thread."""

    def once(_: int) -> list[str]:
        return [f"{n} {p.digest()}" for loads in tied_and_drawn() for n, p in every_plan(loads, 4, 4).items()]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(once, range(repeats)))
    assert all(other == found[0] for other in found)
    return found[0]
