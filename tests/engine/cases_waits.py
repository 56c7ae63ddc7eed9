"""What rank processes run to count how often a layer's host waits for the device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_laer.comm.process_group import ProcessGroupCommunicator
from tests.engine.cases import patched
from tests.engine.cases_edges import block_results
from tests.models import assert_close, full, tiny_model

EXPERTS = 7
# Tokens of each rank, in turns: ranks have none now and then.
TOKENS = (5, 0, 9, 1)


def waits(strategy: str, routings: str, **config: Any) -> list[int]:
    """How often each forward waits, one step per letter: ``s`` is spread routing, ``h`` and ``1`` have hot experts.

    Output and every gradient equal the unpatched block's in each.
    """
    plain, model = (tiny_model("qwen3_moe", num_experts=EXPERTS) for _ in range(2))
    patched(model, strategy=strategy, **config)
    want_block, block = (which.model.layers[0].mlp.experts for which in (plain, model))
    to_host, found = ProcessGroupCommunicator.to_host, []

    def counting(comm: ProcessGroupCommunicator, *told: Any) -> torch.Tensor:
        found[-1] += 1
        return to_host(comm, *told)

    for step, routing in enumerate(routings):
        found.append(0)
        world, rank = dist.get_world_size(), dist.get_rank()
        inputs = [_inputs(step, one, routing, model.config.hidden_size) for one in range(world)]
        for module in (want_block, block):
            module.zero_grad()
        want = [block_results(want_block, *one) for one in inputs]
        with patch.object(ProcessGroupCommunicator, "to_host", counting):
            got = block_results(block, *inputs[rank])
        for name, ours, theirs in zip(("out", "hidden", "weights"), got, want[rank], strict=True):
            assert_close(ours, theirs, f"{name} of step {step}")
        for name, parameter in block.named_parameters():
            wanted = want_block.get_parameter(name).grad / world
            assert_close(full(parameter.grad), wanted, f"{name} of step {step}")
    return found


def _inputs(step: int, rank: int, routing: str, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, choices and weights of a rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = 8 if routing == "s" else TOKENS[(step + rank) % len(TOKENS)]
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    if routing == "s":
        # As many to each rank's experts as can be: nothing is worth moving.
        first = torch.arange(tokens) % EXPERTS
        index = torch.stack([first, (first + 3) % EXPERTS], 1)
    elif routing == "h":
        index = torch.tensor([[0, 1]]).expand(tokens, 2).contiguous()
    else:
        index = torch.tensor([[6, 5]]).expand(tokens, 2).contiguous()
    return hidden, index, torch.rand(tokens, 2, generator=generator)
