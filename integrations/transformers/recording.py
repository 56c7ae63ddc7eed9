"""``record_trace``: the routing of a patched model, written as a trace that ``hf-laer simulate`` replays."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hf_laer.engine import Engine
from hf_laer.integrations.transformers.patch import get_engine
from hf_laer.sim.trace import TraceWriter

logger = logging.getLogger(__name__)


class TraceRecording:
    """A recording under way; see :func:`record_trace`. As a context manager it is stopped, and so saved, at the end.

    Every rank has one, but only the world's first keeps loads and writes.
    """

    def __init__(self, model: nn.Module, engine: Engine, path: Path, max_bytes: int) -> None:
        self.path = path
        self._model, self._engine = model, engine
        self._order = {name: at for at, name in enumerate(engine.layers)}
        self._writer = TraceWriter(len(self._order), max_bytes=max_bytes) if _is_first() else None
        self._ranks = self._top_k = 0

    @property
    def steps(self) -> int:
        """Training micro-batches at hand; 0 on all ranks but the first."""
        return self._writer.steps if self._writer is not None else 0

    def __call__(self, layer: str, loads: np.ndarray, top_k: int) -> None:
        """Takes one layer's loads int64 ``[N, E]`` of one training micro-batch from the engine."""
        if self._writer is not None:
            self._ranks, self._top_k = len(loads), top_k
            self._writer.add(self._order[layer], loads)

    def save(self) -> None:
        """Writes what was recorded so far; on ranks other than the first nothing happens.

        Raises:
            ValueError: No whole micro-batch was recorded.
        """
        if self._writer is not None:
            self._writer.meta.update(self._told())
            self._writer.save(self.path)

    def stop(self) -> None:
        """Ends the recording and writes it, or warns that nothing was recorded."""
        if self._engine.watcher is self:
            self._engine.watcher = None
        if self.steps:
            self.save()
        elif self._writer is not None:
            logger.warning("no training micro-batch ran while %s was to be recorded: nothing is written", self.path)

    def __enter__(self) -> TraceRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _told(self) -> dict[str, Any]:
        """The trace's metadata: the model, the machine, and what ran."""
        config = self._engine.config
        layer = next(iter(self._engine.layers.values()))
        down = layer.homes[layer.spec.down].parameter.shape
        width = max(1, min(self._engine.ranks_per_node, self._ranks))
        told = {
            "model": getattr(getattr(self._model, "config", None), "name_or_path", "") or type(self._model).__name__,
            "layers": list(self._order),
            "hidden": layer.spec.hidden_size,
            "intermediate": int(down[1] if layer.spec.is_transposed else down[2]),
            "top_k": self._top_k,
            "ranks_per_node": width,
            "nodes": -(-self._ranks // width),
            "replicas": self._engine.comms.replicas.size,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "strategy": ", ".join(sorted({layer.config.strategy for layer in self._engine.layers.values()})),
            "group_size": config.group_size,
        }
        return told if config.slots_per_rank is None else {**told, "slots": config.slots_per_rank}


def record_trace(model: nn.Module, path: str | Path, *, max_bytes: int = 2**28) -> TraceRecording:
    """Records the loads of every MoE layer in every training micro-batch from now on. To be called on all ranks.

    Loads are tokens per step, layer, rank and expert, of all ranks of the world, whatever ``group_size`` and however
    many replicas an HSDP mesh has; a step is a training micro-batch. Evaluation and recomputes are not recorded.
    Recording costs one small all-gather per layer (two with replicas).

    Args:
        model: A patched model, sharded by now or later.
        path: The ``.npz`` file that :meth:`TraceRecording.save` and :meth:`TraceRecording.stop` write (aside, then
            renamed) on the world's first rank.
        max_bytes: Host memory for the loads on that rank; the oldest micro-batches fall out.

    Returns:
        The recording: ``with record_trace(model, "trace.npz"): train()``, or call ``stop()``.

    Raises:
        ValueError: The model is not patched, or is recorded already, ``auto`` has left all its layers to FSDP2 by now,
            they differ in their number of experts, or ``path`` does not end in ``.npz``.
    """
    engine = get_engine(model)
    if engine is None:
        raise ValueError("the model is not patched: call patch_model first")
    if engine.watcher is not None:
        raise ValueError("the model is being recorded already: stop() that recording first")
    if not engine.layers:
        raise ValueError(
            "auto has left every MoE layer to FSDP2, and what hf_laer does not run it cannot record: begin before the "
            "model is prepared, or name a strategy, such as LaerConfig(strategy='llep')"
        )
    if left := [name for name, choice in engine.choices.items() if choice.config is None]:
        logger.warning("auto has left %s to FSDP2: the trace is without them", ", ".join(left))
    sizes = sorted({layer.spec.num_experts for layer in engine.layers.values()})
    if len(sizes) > 1:
        raise ValueError(f"layers of {' and '.join(map(str, sizes))} experts do not fit into one trace")
    engine.watcher = recording = TraceRecording(model, engine, check_path(path), max_bytes)
    if _is_first():
        recording.path.parent.mkdir(parents=True, exist_ok=True)
    return recording


def check_path(path: str | Path) -> Path:
    """The path of a trace that can be read again.

    Raises:
        ValueError: It does not end in ``.npz``.
    """
    if Path(path).suffix != ".npz":
        raise ValueError(f"trace={str(path)!r} must end in .npz")
    return Path(path)


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
