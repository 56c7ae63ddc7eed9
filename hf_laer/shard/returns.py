"""Weight gradients on their way home while backward goes on: at most one layer's, joined when backward ends."""

from __future__ import annotations

import torch
from torch.autograd import Variable

from hf_laer.comm.watch import Watch, Where
from hf_laer.shard.exchange import Reshard
from hf_laer.shard.home import Home


class GradientReturns:
    """Finishes each layer's reshard when the next layer starts its own, and the last one when backward ends.

    A backward may run inside another (a function that differentiates in its own backward): each has its own queue.

    Args:
        watch: Told for which layer a reshard is finished.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pending: dict[int, tuple[Reshard, Where]] = {}
        self._touched: dict[int, dict[int, Home]] = {}

    def push(self, reshard: Reshard) -> None:
        """Takes a started reshard; called in backward, in the same order on every rank."""
        task = torch._C._current_graph_task_id()
        if task not in self._pending:
            self._touched[task] = {}
            Variable._execution_engine.queue_callback(lambda: self._join(task))
        self._finish(self._pending.get(task))
        self._pending[task] = reshard, self._watch.where
        self._touched[task].update({id(home.parameter): home for home in reshard.homes.values()})

    def forget(self) -> None:
        """Drops what a backward that failed midway left behind; called where none is running."""
        self._pending.clear()
        self._touched.clear()

    def _join(self, task: int) -> None:
        """Finishes what is left, then runs each parameter's hooks, once however often its layer was used."""
        self._finish(self._pending.pop(task, None))
        for home in self._touched.pop(task, {}).values():
            home.run_hooks()

    def _finish(self, pending: tuple[Reshard, Where] | None) -> None:
        if pending is not None:
            reshard, where = pending
            with self._watch.at(where):
                reshard.finish()
