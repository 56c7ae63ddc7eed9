"""Every strategy against the unpatched model on the GPUs of this host, Triton kernels and NCCL included.

    torchrun --nproc_per_node=2 -m tests.gpu.equal

With ``--one-gpu`` any number of ranks share the first GPU.

fp32: loss, logits and every gradient to 1e-5 (sizes that divide nothing, and sizes that the grouped kernels take).
bf16: each gradient's error against fp32 beside the unpatched model's own, also with large groups multiplied alone.
Without GPUs it runs on CPUs, over gloo.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hf_laer.bench.models import OURS
from hf_laer.compute import grouped_gemm
from hf_laer.config import RECOMPUTE
from tests.engine import cases, cases_edges
from tests.gpu.ranks import ranks_of_one_gpu, ranks_of_this_host

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
# Rows of 16 bytes in either precision, which grouped_mm wants.
ALIGNED = {
    "mixtral": {"hidden_size": 48, "intermediate_size": 40},
    "qwen2_moe": {"hidden_size": 48, "moe_intermediate_size": 40},
    "qwen3_moe": {"hidden_size": 48, "moe_intermediate_size": 40},
    "gpt_oss": {"hidden_size": 48, "intermediate_size": 40},
}


def checkpointed(model: nn.Module) -> None:
    """Switches activation checkpointing on."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


def exact(family: str, strategy: str, recompute: str | None, sizes: dict[str, Any]) -> str:
    """Raises unless equal to 1e-5; what was moved."""
    config: dict[str, Any] = {"strategy": strategy, "history": 1}
    if recompute is not None:
        config["recompute"] = recompute
    prepare = None if recompute is None else checkpointed
    moved = cases.equal_to_unpatched(family, config, prepare, sizes)
    return f"spilled {moved['spilled']}, moved {moved['moved']}"


def kept(family: str, strategy: str) -> str:
    """As :func:`exact`, where experts stay until their layer's backward."""
    config = {"strategy": strategy, "history": 1, "reshard_after_forward": False}
    return f"spilled {cases.equal_to_unpatched(family, config, None, ALIGNED[family])['spilled']}"


def half(family: str, strategy: str, **config: Any) -> str:
    """The worst ratio of our error to the unpatched model's; raises where it is above 1.5."""
    # The more ranks, the more tokens of which one is routed otherwise.
    steps = 12 * max(1, dist.get_world_size() // 2)
    found = cases_edges.half_precision(family, strategy, steps, changes=ALIGNED[family], least=6, **config)
    ratio, name = max((ours / (theirs + 1e-3), name) for name, (theirs, ours) in found.items())
    assert ratio <= 1.5, f"{name}: {found[name]}"
    return f"bf16 error at most {ratio:.2f} times the unpatched model's ({name})"


def half_apart(family: str, strategy: str) -> str:
    """As :func:`half`, where a few rows are a large group, which is multiplied alone."""
    with patch.object(grouped_gemm, "_ALONE_FLOPS", 20_000):
        return half(family, strategy)


def half_in_chunks(family: str, strategy: str) -> str:
    """As :func:`half`, few rows at a time."""
    return half(family, strategy, max_rows_per_rank=50)


def main() -> int:
    """Runs all that the flags name; the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--strategies", default=",".join(OURS))
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU, without NCCL")
    args = parser.parse_args()
    with ranks_of_one_gpu() if args.one_gpu else ranks_of_this_host():
        if torch.cuda.is_available():
            torch.set_default_device("cuda")
        failures = tried(args.families.split(","), args.strategies.split(","))
        dist.barrier()
    dist.destroy_process_group()
    return failures


def tried(families: list[str], strategies: list[str]) -> int:
    """Prints a line for each way on the first rank; the number of failures."""
    failures = 0
    for family, strategy in itertools.product(families, strategies):
        jobs = {"fp32": lambda f, s: exact(f, s, None, {}), "fp32, aligned": lambda f, s: exact(f, s, None, ALIGNED[f])}
        jobs |= {f"recompute {how}": lambda f, s, how=how: exact(f, s, how, ALIGNED[f]) for how in RECOMPUTE}
        jobs |= {"kept": kept, "bf16": half, "bf16, large groups": half_apart, "bf16, in chunks": half_in_chunks}
        for name, job in jobs.items():
            started = time.perf_counter()
            try:
                said = job(family, strategy)
            except AssertionError as error:
                said, failures = f"FAILED: {error}", failures + 1
            if dist.get_rank() == 0:
                sys.stdout.write(f"{family} {strategy} {name}: {said} ({time.perf_counter() - started:.1f} s)\n")
                sys.stdout.flush()
    return failures


if __name__ == "__main__":
    sys.exit(main())
