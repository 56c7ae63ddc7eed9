"""The tuner: makes the next placement of each layer from its recent loads, off the training thread.

A placement depends only on loads that all ranks hold, and a layer uses the one made from its latest training
micro-batch, waiting for it if need be: so all ranks use the same one with no collective of its own.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from hf_laer.config import LaerConfig
from hf_laer.plan import fsep_placement, initial_placement
from hf_laer.plan.types import Placement


class LayerTuner:
    """Placements of one layer, one for each token group.

    Args:
        config: Slots, history and interval.
        num_experts: E.
        groups: Ranks of each token group; consecutive, alike on all ranks.
        ranks_per_node: Ranks that share a node.
        pool: Where placements are worked out; the planner lets go of the interpreter meanwhile.
    """

    def __init__(
        self, config: LaerConfig, num_experts: int, groups: list[range], ranks_per_node: int, pool: ThreadPoolExecutor
    ) -> None:
        self._config, self._groups, self._pool = config, groups, pool
        self._ranks_per_node = ranks_per_node
        self._history: deque[np.ndarray] = deque(maxlen=config.history)
        self._seen = 0
        self._current = [
            initial_placement(num_experts, len(group), config.slots_for(num_experts, len(group))) for group in groups
        ]
        self._next: Future[list[Placement]] | None = None

    def placements(self) -> list[Placement]:
        """The layout to use now, one placement for each token group."""
        if self._next is not None:
            self._current, self._next = self._next.result(), None
        return self._current

    def observe(self, loads: np.ndarray) -> None:
        """Feeds the loads ``[N, E]`` of one training micro-batch; starts on the next layout if one is due."""
        self._history.append(loads)
        self._seen += 1
        if self._seen % self._config.relayout_interval == 0:
            self.placements()
            self._next = self._pool.submit(self._work_out, np.sum(self._history, axis=0))

    def state_dict(self) -> dict[str, Any]:
        """Recent loads and the layout to use now, in JSON's types; the same on all ranks."""
        return {
            "seen": self._seen,
            "history": [loads.tolist() for loads in self._history],
            "placements": [placement.slots.tolist() for placement in self.placements()],
        }

    def load_state_dict(self, memory: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; one of another number of ranks or slots is passed over."""
        slots = [np.array(table, np.int64) for table in memory["placements"]]
        if [table.shape for table in slots] != [placement.slots.shape for placement in self._current]:
            return
        self._current, self._next = [Placement(table) for table in slots], None
        self._history.clear()
        self._history.extend(np.array(loads, np.int64) for loads in memory["history"])
        self._seen = memory["seen"]

    def _work_out(self, loads: np.ndarray) -> list[Placement]:
        slots = [self._config.slots_for(loads.shape[1], len(group)) for group in self._groups]
        return [
            fsep_placement(loads[group.start : group.stop], len(group), room, ranks_per_node=self._ranks_per_node)
            for group, room in zip(self._groups, slots, strict=True)
        ]
