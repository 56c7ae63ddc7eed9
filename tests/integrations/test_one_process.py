"""On one device, without a process group: Transformers' own Trainer, and TRL's, with the callback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from hf_laer import LaerConfig
from hf_laer.integrations.trl import LaerCallback
from tests.integrations import rig_trl
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(folder: Path, callbacks: list[Any], resume: bool = False, **settings: Any) -> Trainer:
    """A trainer after four steps."""
    set_seed(0)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    trainer = Trainer(
        model=tiny_model("qwen3_moe"),
        args=arguments,
        train_dataset=rig_trl.rows_of_tokens(16),
        data_collator=DataCollatorForLanguageModeling(rig_trl.tokenizer(), mlm=False),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """By step."""
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_trainer(tmp_path: Path) -> None:
    callback = LaerCallback(LaerConfig(strategy="fsep"))
    np.testing.assert_allclose(losses(trained(tmp_path, [callback])), losses(trained(tmp_path, [])), rtol=1e-5)
    assert len(callback.records) == 8


def test_records_are_bounded(tmp_path: Path) -> None:
    callback = LaerCallback(LaerConfig(strategy="llep"), keep=3)
    trained(tmp_path, [callback])
    assert [record.step for record in callback.records] == [2, 3, 3]


def test_resume_that_also_restores_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer then replaces the callback by a new one, made from the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": True}
    trained(tmp_path, [LaerCallback(LaerConfig(strategy="fsep"))], **saving)
    given = LaerCallback(LaerConfig(strategy="fsep"))
    trainer = trained(tmp_path, [given], resume=True, **saving)
    (made,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LaerCallback))
    assert made is not given
    assert made.config == given.config
    assert [record.step for record in made.records] == [2, 2, 3, 3], "the memory goes on"
    assert "from_pretrained(checkpoint)" in caplog.text


def test_resume_with_another_strategy(tmp_path: Path) -> None:
    """The memory of another strategy is no hindrance."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, [LaerCallback(LaerConfig(strategy="fsep"))], **saving)
    changed = trained(tmp_path, [LaerCallback(LaerConfig(strategy="llep"))], resume=True, **saving)
    assert len(losses(changed)) == 4
