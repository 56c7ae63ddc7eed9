"""Published planners on the same engine: LAER's, FlexMoE's, and the static mix of FSDP and EP.

Experts are sharded over all ranks here as under ``fsep``, so a new layout costs nothing beyond the unshard; FlexMoE's
own system moves optimizer states along, and would pay for that too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_laer.config import LaerConfig
from hf_laer.engine import Engine
from hf_laer.layer import MoELayer
from hf_laer.plan.types import Placement, Plan
from hf_laer.profile import Profile
from hf_laer.sim.methods import METHODS, Method, Setting
from hf_laer.tuner import LayerTuner, Version, version_of

# What each places by: LAER sums five micro-batches, FlexMoE looks at the last one.
PLANNED: dict[str, dict[str, Any]] = {
    "fsdp_ep": {"history": 1, "forecast": "last"},
    "laer": {"history": 5, "forecast": "mean"},
    "flexmoe": {"history": 1, "forecast": "last"},
}


class PlannedTuner(LayerTuner):
    """A layer's placements by a method of the simulator."""

    def __init__(self, method: Method, setting: Setting, *args: Any) -> None:
        super().__init__(*args)
        self._method, self._setting = method, setting
        self._last = [_start(method, setting) for _ in self._groups]
        self._current = version_of(0, self._last)
        if method.place is not None:
            # Compiled now, not while the first layouts are waited for.
            method.place(np.ones(setting.experts, np.int64), self._last[0], setting)

    def observe(self, loads: np.ndarray, plans: Any) -> None:
        """Nothing where the method never places anew."""
        if self._method.place is not None:
            super().observe(loads, plans)

    def _work_out(self, number: int, expected: np.ndarray, recent: list[np.ndarray], hedge: int) -> Version:
        assert self._method.place is not None
        pairs = zip(expected, self._last, strict=True)
        placed = [self._method.place(loads, last, self._setting) for loads, last in pairs]
        self._last = [placement for placement in placed if isinstance(placement, Placement)]
        return version_of(number, self._last)


class PlannedEngine(Engine):
    """An engine whose layers run as ``fsep``, by one of ``PLANNED``.

    Args:
        name: Which.
        config: Its strategy is ``fsep``.
        ranks_per_node: Ranks that share a node.
        profile: The machine's; ``None`` takes what is shipped for it.
    """

    def __init__(self, name: str, config: LaerConfig, ranks_per_node: int, profile: Profile | None = None) -> None:
        super().__init__(config, ranks_per_node, profile)
        self.method = METHODS[name]

    def _setting(self, layer: MoELayer) -> Setting:
        experts, ranks = layer.spec.num_experts, len(self._groups[0])
        cost = self._cost(layer, layer.spec.top_k or 1)
        assert cost is not None
        return Setting(cost, experts, layer.config.slots_for(experts, ranks))

    def _plans(self, layer: MoELayer, loads: np.ndarray, layout: list[Placement] | None, top_k: int) -> list[Plan]:
        assert layout is not None
        setting = self._setting(layer)
        groups = zip(self._groups, layout, strict=True)
        return [self.method.plan(loads[group.start : group.stop], placement, setting) for group, placement in groups]

    def _tuner(self, layer: MoELayer) -> LayerTuner:
        if layer.name not in self._tuners:
            told = layer.config, layer.spec.num_experts, self._groups, self.ranks_per_node, self._threads
            self._tuners[layer.name] = PlannedTuner(self.method, self._setting(layer), *told)
        return self._tuners[layer.name]


def _start(method: Method, setting: Setting) -> Placement:
    """The layout that a method begins with; of one that has none, what it plans for no tokens."""
    if method.start is None:
        return method.plan(np.zeros((setting.ranks, setting.experts), np.int64), None, setting).placement
    placement = method.start(setting)
    assert isinstance(placement, Placement)
    return placement
