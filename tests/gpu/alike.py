"""Peers' memory against messages: every bit of every gradient alike, also where experts stay until backward.

    torchrun --nproc_per_node=4 -m tests.gpu.alike --one-gpu

Four layers in a row, loads that drift. Without GPUs it runs on CPUs, with smaller layers.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_laer.bench.layer import Batch, Bench, LayerShape
from hf_laer.bench.models import OURS
from tests.gpu.ranks import ranks_of_one_gpu, ranks_of_this_host

ON_GPU = LayerShape(experts=8, hidden=1024, intermediate=2048, top_k=2, tokens=2048, layers=4)
ON_CPU = LayerShape(experts=8, hidden=64, intermediate=96, top_k=2, tokens=128, layers=4)
# Every step's loads ask for another layout, and what can be spilled is.
MOVING = {"history": 1, "min_tokens_per_gemm": 1, "imbalance_threshold": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "messages": {"peer_memory": False},
    "memory": {"peer_memory": True},
    "memory, kept": {"peer_memory": True, "reshard_after_forward": False},
}


def gradients(strategy: str, steps: int, **settings: Any) -> list[torch.Tensor]:
    """This rank's, of every step: of tokens, routing weights and its blocks of the experts. Collective."""
    on_gpu = torch.cuda.is_available()
    shape = ON_GPU if on_gpu else ON_CPU
    kind = (torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")), torch.bfloat16
    torch.manual_seed(1)
    made = Bench(shape, *kind, settings=MOVING | settings).contender(strategy)
    torch.manual_seed(100 + dist.get_rank())
    batch, found = Batch(shape, "drift:0.9", *kind), []
    for _ in range(steps):
        for tensor in (batch.hidden, batch.gates, *made.weights):
            tensor.grad = None
        # A layout that is made in time in one run might be late in another.
        with patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
            made.run(*batch()).backward(batch.grad)
        grads = [tensor.grad for tensor in (batch.hidden, batch.gates, *made.weights)]
        found += [(grad.to_local() if isinstance(grad, DTensor) else grad).cpu() for grad in grads if grad is not None]
    assert made.engine is not None
    assert (made.engine.shared_bytes > 0) == settings["peer_memory"], "memory is shared, or not, unasked"
    assert made.engine.unsharder.keeps == (settings.get("reshard_after_forward") is False)
    return found


def main() -> int:
    """Prints a line for each strategy and way on the first rank; how many differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(OURS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU, without NCCL")
    args, failures = parser.parse_args(), 0
    with ranks_of_one_gpu() if args.one_gpu else ranks_of_this_host():
        for strategy in args.strategies.split(","):
            found = {way: gradients(strategy, args.steps, **settings) for way, settings in WAYS.items()}
            for way in list(WAYS)[1:]:
                alike = sum(torch.equal(*pair) for pair in zip(found["messages"], found[way], strict=True))
                failures += alike < len(found["messages"])
                told: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(told, alike)
                if dist.get_rank() == 0:
                    sys.stdout.write(f"{strategy}, {way}: of {len(found['messages'])} gradients alike: {told}\n")
                    sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()
    return failures


if __name__ == "__main__":
    sys.exit(main())
