"""Training's progress on the terminal: a bar, and a line for each log with what matters here."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

# Key in the trainer's logs, name on the terminal, format.
SHOWN = (
    ("eval_loss", "held-out loss", "{:.3f}"),
    ("loss", "loss", "{:.3f}"),
    ("grad_norm", "norm", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
    ("laer/imbalance_before", "imbalance", "{:.2f}"),
    ("laer/imbalance_after", "planned", "{:.2f}"),
    ("laer/spilled", "spilled", "{:.0f}"),
    ("laer/moved", "moved", "{:.0f}"),
    ("laer/plan_ms", "plan ms", "{:.2f}"),
)


class ProgressCallback(TrainerCallback):
    """Shows progress on the first process, and adds ``tokens_per_second`` to the logs.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None
        self._tokens = 0.0
        self._since = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()
        if state.is_world_process_zero:
            self._progress.start()
            self._task = self._progress.add_task("training", total=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds tokens per second of all processes since the last log, from TRL's count of tokens seen."""
        if not logs or not {"loss", "eval_loss"} & set(logs):
            return
        if "eval_loss" in logs:
            # The time of an evaluation is not training's.
            self._since = time.perf_counter()
        elif "num_tokens" in logs:
            now, tokens = time.perf_counter(), float(logs["num_tokens"])
            logs["tokens_per_second"] = (tokens - self._tokens) / (now - self._since)
            self._tokens, self._since = tokens, now
            state.log_history[-1]["tokens_per_second"] = logs["tokens_per_second"]
        if state.is_world_process_zero:
            self.console.print(f"step {state.global_step:>5}  {log_line(logs)}", highlight=False, soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._task is not None:
            self._progress.stop()


def log_line(logs: dict[str, Any]) -> str:
    """One line of the numbers in ``logs`` that are shown, in their order."""
    return "  ".join(f"{name} {form.format(float(logs[key]))}" for key, name, form in SHOWN if key in logs)
