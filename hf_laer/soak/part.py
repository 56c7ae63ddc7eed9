"""One part of a soak, on one rank: trains under Accelerate, compares with the shadow, saves."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hf_laer.config import LaerConfig
from hf_laer.plan.types import imbalance
from hf_laer.shard.exchange import forget_tables
from hf_laer.soak.shadow import Compared, Shadow, gradients_of, same_state, state_of
from hf_laer.soak.task import CLIP, UNPATCHED, Settings, batch, loss_of, optimizer_of, tiny_model

SAMPLE = 10


@dataclass
class Told:
    """What one rank tells of its part.

    Args:
        losses: Each step's mean over ranks and micro-batches.
        evaluations: Losses of evaluations.
        compared: Steps beside the shadow's (rank 0 only).
        lost: What a resume did not bring back as it was saved (rank 0 only).
        memory: Step and resident bytes, now and then.
        before: Mean of max/mean over ranks of the owners' loads.
        after: Likewise of the loads computed.
        spilled: Tokens.
        moved: Replicas.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    spilled: int = 0
    moved: int = 0


class Part:
    """Steps ``start`` to ``stop`` on this rank.

    Args:
        settings: The soak's.
        folder: Where checkpoints are.
        start: First step; where it is not 0, the part resumes.
        stop: One past the last.
    """

    def __init__(self, settings: Settings, folder: Path, start: int, stop: int) -> None:
        self.settings, self.folder, self.start, self.stop = settings, folder, start, stop
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.accelerator, self.model, self.optimizer = _prepared(settings, self.ranks)
        self.shadow = Shadow(settings) if self.rank == 0 else None
        self.told = Told()
        self.records = 0

    def run(self) -> dict[str, Any]:
        """Trains; the result is :class:`Told`'s fields."""
        from hf_laer.integrations.transformers import get_engine

        engine = get_engine(self.model)
        assert (engine is None) == (self.settings.strategy == UNPATCHED)
        if self.start:
            self._resume()
        for step in range(self.start, self.stop):
            if step % self.settings.check == 0 or step == self.start:
                self._compared_step(step)
            else:
                self.told.losses.append(self._step(step))
            if (step + 1) % self.settings.evaluate == 0:
                self.told.evaluations.append(self._evaluate())
            if step % SAMPLE == 0:
                self.told.memory.append((step, resident_bytes()))
            if engine is not None:
                self._note(engine.recorder.drain())
        self._save()
        return asdict(self.told)

    def _step(self, step: int, looked: Any = None) -> float:
        """One optimizer step; ``looked`` is called once the gradients are whole. Returns the mean loss."""
        mine = range(self.rank, self.settings.streams, self.ranks)
        total = torch.zeros(())
        for stream in mine:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch(self.settings, step, stream))
                self.accelerator.backward(loss)
                total += loss.detach()
                if self.accelerator.sync_gradients:
                    if looked is not None:
                        looked()
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.settings.streams

    def _compared_step(self, step: int) -> None:
        before, gradients = state_of(self.model, self.optimizer), {}
        self.told.losses.append(self._step(step, lambda: gradients.update(gradients_of(self.model))))
        after = state_of(self.model, self.optimizer)
        if self.shadow is not None:
            found: Compared = self.shadow.compare(step, before, gradients, after)
            self.told.compared.append(asdict(found))
        gc.collect()

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.model.eval()
        total = loss_of(self.model, batch(self.settings, -1, self.rank))
        self.model.train()
        for module in self.model.modules():
            # With no backward to come, FSDP leaves its last unit unsharded: parameters that no optimizer knows.
            if isinstance(module, FSDPModule):
                module.reshard()
        dist.all_reduce(total)
        return total.item() / self.ranks

    def _note(self, records: list[Any]) -> None:
        for record in records:
            self.told.before += imbalance(record.loads_before)
            self.told.after += imbalance(record.loads_after)
            self.told.spilled += record.spilled
            self.told.moved += record.moved
        self.records += len(records)

    def _save(self) -> None:
        """The checkpoint, and beside it the state in full, to which a resume is held."""
        count = max(1, self.records)
        self.told.before, self.told.after = self.told.before / count, self.told.after / count
        self.accelerator.save_state(str(self.folder / f"step-{self.stop}"))
        state = state_of(self.model, self.optimizer)
        if self.rank == 0:
            torch.save(state, self.folder / f"state-{self.stop}.pt")
        dist.barrier()

    def _resume(self) -> None:
        self.accelerator.load_state(str(self.folder / f"step-{self.start}"))
        got = state_of(self.model, self.optimizer)
        if self.rank == 0:
            want = torch.load(self.folder / f"state-{self.start}.pt", weights_only=True)
            self.told.lost = same_state(got, want)


def _prepared(settings: Settings, ranks: int) -> tuple[Any, Any, Any]:
    """The accelerator, the patched model with activation checkpointing, and its optimizer."""
    from accelerate import Accelerator

    from hf_laer.integrations.accelerate import enable_cpu_fsdp

    enable_cpu_fsdp()
    plugin = _plugin(settings.strategy)
    accumulation = settings.streams // ranks
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    model = tiny_model(settings.seed)
    # Transformers renames it.
    switch = "activation_checkpointing_enable"
    getattr(model, switch if hasattr(model, switch) else "gradient_checkpointing_enable")()
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def _plugin(strategy: str) -> Any:
    """FSDP2 layer by layer, with our experts in it unless the model is to stay unpatched."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hf_laer.integrations.accelerate import LaerFSDPPlugin

    saving = {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False}
    if strategy == UNPATCHED:
        wrapping: Any = "transformer_based_wrap"
        return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrapping, **saving)
    config = LaerConfig(strategy=strategy, min_tokens_per_gemm=1, imbalance_threshold=1.0)
    return LaerFSDPPlugin(laer=config, **saving)


def resident_bytes() -> int:
    """Resident memory that this process holds by itself, or 0 where the system does not say.

    Left out is what has a bound but fills for longer than a part lasts: what is kept of slot tables seen, pages that
    the allocator keeps though all in them was freed, and pages of libraries, which come as code is first run.
    """
    forget_tables()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
