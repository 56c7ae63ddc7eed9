"""One Accelerate after another in a process: for measurements side by side, and for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, GradientState

from hf_laer.integrations.accelerate.cpu import enable_cpu_fsdp


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate as in a new process of a launcher; nothing of it is left afterwards.

    An ``Accelerator`` tells Transformers that FSDP is on through environment variables, which outlive it and would
    change how the next contender loads its model: they are put back.
    """
    before = dict(os.environ)
    enable_cpu_fsdp()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
