"""Weight gradients on their way home while backward goes on: at most one layer's, joined when backward ends."""

from __future__ import annotations

import torch
from torch.autograd import Variable

from hf_laer.shard.exchange import Reshard


class GradientReturns:
    """Finishes each layer's reshard when the next layer starts its own, and the last one when backward ends."""

    def __init__(self) -> None:
        self._pending: Reshard | None = None
        self._task = -1

    def push(self, reshard: Reshard) -> None:
        """Takes a started reshard; called in backward, in the same order on every rank."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            # A backward that failed midway left one behind; its gradients are void.
            self._pending, self._task = None, task
            Variable._execution_engine.queue_callback(self.join)
        if self._pending is not None:
            self._pending.finish()
        self._pending = reshard

    def join(self) -> None:
        """Finishes what is left."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()
