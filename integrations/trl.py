"""``LaerCallback``: hf_laer in TRL's trainers, and in Transformers' own, by one callback."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState, PartialState
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_laer.config import LaerConfig
from hf_laer.integrations import upstream
from hf_laer.integrations.accelerate.hook import install_hook
from hf_laer.integrations.accelerate.resume import take_up
from hf_laer.integrations.transformers import get_engine, patch_model
from hf_laer.integrations.transformers.checkpoints import begin_again, pass_over_cut_checkpoints
from hf_laer.integrations.transformers.recording import TraceRecording, check_path, record_trace
from hf_laer.integrations.transformers.validate import check_arguments, check_loader, check_sharded, check_state
from hf_laer.plan.types import imbalance

if TYPE_CHECKING:
    from hf_laer.choice import Choice
    from hf_laer.engine import Engine
    from hf_laer.telemetry.record import LayerRecord

logger = logging.getLogger(__name__)
_TOO_LATE = (
    "LaerCallback was added after the trainer was made, when the model can no longer be patched: give it to "
    "the trainer instead, SFTTrainer(..., callbacks=[LaerCallback(config)]), or call patch_model before "
    "making the trainer"
)
_EXPERTS_NOT_LOADED = (
    "without FSDP, Transformers' Trainer resumes a MoE model with its experts as they were given, not as in the "
    "checkpoint (it reports them as missing keys): when you resume, give the trainer "
    "AutoModelForCausalLM.from_pretrained(checkpoint)"
)


class LaerCallback(TrainerCallback, ExportableState):
    """Patches the trainer's model, and puts imbalance and plan time into the trainer's logs.

    Args:
        config: How the MoE layers run, as a ``LaerConfig`` or its mapping (which is what a checkpoint holds);
            ``None`` means ``LaerConfig()``.
        keep: Records kept in :attr:`records`; the oldest fall out.
        trace: Where the first rank writes a trace of the routing (``.npz``, for ``hf-laer simulate``), with every
            checkpoint and when training ends; ``None``: nowhere. See :func:`record_trace`.
            With it ``auto`` leaves no layer to FSDP2.

    Attributes:
        records: What the engine noted of each layer and micro-batch.
        recorded: Whether ``auto`` may leave no layer to FSDP2, as its loads would not be seen: so with a trace, and
            where it is set before the trainer is made.

    The logs get, over the MoE layers and micro-batches since the last log: ``laer/imbalance_before`` and
    ``laer/imbalance_after`` (mean of max/mean tokens over ranks), ``laer/imbalance_before_max`` and
    ``laer/imbalance_after_max`` (the worst), ``laer/spilled`` (tokens) and ``laer/moved`` (replicas), both
    summed, ``laer/plan_ms`` (mean host time of one plan), ``laer/expert_imbalance`` (mean of max/mean tokens over
    experts) and ``laer/experts_active`` (mean share of experts that got a token). However many layers and experts
    there are, these are all; :attr:`records` and the trace have the rest. Layers that ``auto`` leaves to FSDP2 have
    neither; :attr:`choices` names them.
    """

    def __init__(
        self,
        config: LaerConfig | Mapping[str, Any] | None = None,
        keep: int = 100_000,
        trace: str | Path | None = None,
    ) -> None:
        self.config = LaerConfig.from_dict(dict(config)) if isinstance(config, Mapping) else config or LaerConfig()
        self.records: deque[LayerRecord] = deque(maxlen=keep)
        self.trace = None if trace is None else check_path(trace)
        self.memory: dict[str, Any] = {}
        self.recorded = trace is not None
        self._engine: Engine | None = None
        self._recording: TraceRecording | None = None
        self._window = _Window()
        self._eval_checked = False

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patches the model. FSDP2 shards it later, when training begins.

        Raises:
            ValueError: The model, the arguments or Accelerate's setup are such that hf_laer does not work
                with them.
        """
        check_arguments(args)
        check_state(AcceleratorState())
        install_hook()
        upstream.install("log", _log_ours_first)
        pass_over_cut_checkpoints()
        patch_model(model, self.config)
        self._engine = get_engine(model)
        if self._engine is not None:
            self._engine.expected_tokens = expected_tokens(args)
            self._engine.recorded = self.recorded
        if state.is_world_process_zero and self._engine is not None:
            logger.info(
                "hf_laer: patched the %d MoE layers of %s with %s",
                *(len(self._engine.layers), type(model).__name__, self.config),
            )

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Checks that the experts are sharded by now, and takes up a checkpoint's memory.

        Raises:
            ValueError: The callback came after the trainer's ``__init__``, or adapters after the model was sharded;
                ranks get unequal batch counts, or the checkpoint's memory is none.
        """
        self._engine = get_engine(model)
        if self._engine is None:
            raise ValueError(_TOO_LATE)
        check_loader(train_dataloader, PartialState().num_processes)
        if self._engine.is_sharded and AcceleratorState().fsdp_plugin.ignored_modules is None:
            check_sharded(model)
        if state.global_step and not self._engine.is_sharded:
            logger.warning(_EXPERTS_NOT_LOADED)
        if state.is_world_process_zero:
            logger.info("hf_laer: the routers' auxiliary loss is %s", auxiliary_loss(model))
        name = type(self).__name__
        what = f"stateful_callbacks.{name}.attributes.memory in the checkpoint's trainer_state.json"
        take_up(self._engine, lambda: _saved(state.stateful_callbacks, name).get("memory", {}), what)
        if self.trace is not None:
            self._recording = record_trace(model, self.trace)

    @property
    def choices(self) -> dict[str, Choice]:
        """How each MoE layer runs, and why, in the model's order; settled once the trainer has sharded the model."""
        return dict(self._engine.choices) if self._engine is not None else {}

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Checks the first evaluation's data loader, which no earlier event shows."""
        if not self._eval_checked:
            check_loader(eval_dataloader, PartialState().num_processes)
            self._eval_checked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the engine's records over, step by step."""
        if self._engine is not None:
            for record in self._engine.recorder.drain():
                self.records.append(record)
                self._window.add(record)
        self._before_save(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A save may follow."""
        self._before_save(args, state, control)

    @staticmethod
    def _before_save(args: Any, state: Any, control: Any) -> None:
        if control.should_save and args.should_save:
            begin_again(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the trace so far, so that a run that is cut short leaves one."""
        if self._recording is not None and self._recording.steps:
            self._recording.save()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the trace; recording ends."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this callback: the arguments, and the engine's memory."""
        memory = self._engine.state_dict() if self._engine is not None else {}
        trace = None if self.trace is None else str(self.trace)
        return {"args": {"config": self.config.to_dict(), "trace": trace}, "attributes": {"memory": memory}}

    def add_to(self, logs: dict[str, float], state: Any) -> None:
        """Adds the numbers since the last call to a training step's logs, and to the log history."""
        if "loss" not in logs or not self._window.count:  # an evaluation's logs, the run's summary
            return
        numbers = self._window.close()
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)


class _Window:
    """Sums over the records since the last log."""

    def __init__(self) -> None:
        self.count = 0
        means = ("imbalance_before", "imbalance_after", "plan_ms", "expert_imbalance", "experts_active")
        self._sums = dict.fromkeys((*means, "spilled", "moved"), 0.0)
        self._worst = dict.fromkeys(("imbalance_before", "imbalance_after"), 0.0)

    def add(self, record: LayerRecord) -> None:
        """Counts one layer and micro-batch in."""
        numbers = {
            "imbalance_before": imbalance(record.loads_before),
            "imbalance_after": imbalance(record.loads_after),
            "spilled": record.spilled,
            "moved": record.moved,
            "plan_ms": 1e3 * record.plan_seconds,
            "expert_imbalance": imbalance(record.expert_loads),
            "experts_active": float((record.expert_loads > 0).mean()),
        }
        self.count += 1
        for key, number in numbers.items():
            self._sums[key] += number
        for key in self._worst:
            self._worst[key] = max(self._worst[key], numbers[key])

    def close(self) -> dict[str, float]:
        """The numbers for the logs; the next window begins."""
        summed = ("spilled", "moved")
        logs = {key: total if key in summed else total / self.count for key, total in self._sums.items()}
        logs |= {f"{key}_max": worst for key, worst in self._worst.items()}
        self.count = 0
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._worst = dict.fromkeys(self._worst, 0.0)
        return {f"laer/{key}": round(number, 4) for key, number in logs.items()}


def expected_tokens(args: Any) -> int | None:
    """Tokens of a rank's micro-batch at most, where the trainer's arguments bound a sequence's length."""
    length = getattr(args, "max_length", None)
    return args.per_device_train_batch_size * length if length else None


def auxiliary_loss(model: Any) -> str:
    """Whether the model adds its routers' auxiliary loss, in words. It is Transformers' own, computed on each rank."""
    config = model.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not coefficient:
        return f"off (router_aux_loss_coef={coefficient})"
    if not getattr(config, "output_router_logits", False):
        return f"off (output_router_logits=False, so that router_aux_loss_coef={coefficient} has no effect)"
    return f"on (router_aux_loss_coef={coefficient})"


def _saved(callbacks: Any, name: str) -> dict[str, Any]:
    """The attributes that ``trainer_state.json`` holds of the callback ``name``, or nothing."""
    saved = callbacks.get(name, {}) if isinstance(callbacks, Mapping) else {}
    saved = saved[0] if isinstance(saved, list) and saved else saved
    attributes = saved.get("attributes", {}) if isinstance(saved, Mapping) else None
    if not isinstance(attributes, Mapping):
        raise ValueError(f"it is no saved callback: {str(saved)[:80]}")
    return dict(attributes)


def _log_ours_first(
    original: upstream.Function,
    handler: CallbackHandler,
    args: Any,
    state: Any,
    control: Any,
    logs: Any,
    **kwargs: Any,
) -> Any:
    """``CallbackHandler.on_log``: our numbers go in before a reporter earlier in the list reads the logs."""
    for callback in handler.callbacks:
        if isinstance(callback, LaerCallback):
            callback.add_to(logs, state)
    return original(handler, args, state, control, logs, **kwargs)
