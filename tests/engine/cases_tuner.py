"""What rank processes run for the tuner's tests."""

from __future__ import annotations

import random
import time
from typing import Any

import torch.distributed as dist

from hf_laer.integrations.transformers import get_engine
from tests.engine.cases import batch_of, compare_gradients, expected, loss_of, movement, patched
from tests.models import tiny_model


def late(strategy: str) -> dict[str, Any]:
    """Ranks whose tuners take random time still agree, and equal the unpatched model."""
    model = patched(tiny_model("qwen3_moe"), strategy=strategy, slots_per_rank=3, history=2)
    engine = get_engine(model)
    assert engine is not None
    rng = random.Random(dist.get_rank())
    for step in range(6):
        # The tuner's one thread is busy for a while, on each rank for another.
        engine._threads.submit(time.sleep, rng.choice([0.0, 0.05, 0.2]))
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        compare_gradients(model, expected("qwen3_moe", step).gradients)
    time.sleep(0.3)
    loss_of(model, batch_of(dist.get_rank(), 6)).backward()
    return movement(model)
