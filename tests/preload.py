"""What rank processes need, imported once: they are forks of one process that has imported this."""

from __future__ import annotations

import gc
import importlib
import os

# Before torch is there; the forks inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

from hf_laer.plan import compile_kernels
from tests.models import FAMILIES

for module in (
    "tests.integrations.cases_lora",
    "tests.integrations.rig_trl",
    "torch.distributed.checkpoint.state_dict",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
):
    importlib.import_module(module)
compile_kernels()
# See tests.pool.
gc.collect()
gc.freeze()
