"""The ranks that torchrun has started: each on a GPU of its own, or several on one.

On one, whether what they write into each other's memory is right can be seen; their speed means nothing. NCCL refuses
such ranks, so messages go through the host, by gloo. PyTorch shares memory between processes of one device if it is
told to; where ranks meet, the device gives each its turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_laer.comm import arena, process_group
from tests import models
from tests.engine import cases, cases_edges


class _Done:
    """A collective that was waited for."""

    def wait(self, *_: Any) -> bool:
        return True


@contextmanager
def ranks_of_one_gpu() -> Iterator[None]:
    """Joins all ranks, which share the first GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo")
    with ExitStack() as stack:
        for owner, name in ((dist, "all_to_all_single"), (process_group, "_all_gather"), (dist, "all_reduce")):
            stack.enter_context(patch.object(owner, name, _through_host(getattr(owner, name))))
        stack.enter_context(patch.object(dist, "all_gather_object", _on_host(dist.all_gather_object)))
        stack.enter_context(patch.object(arena, "_reaches_all", lambda *_: True))
        for module in (models, cases, cases_edges):
            stack.enter_context(patch.object(module, "full", _full))
        yield


def _through_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective of copies on the host; its first argument is what it writes to."""

    def call(*args: Any, group: Any = None, async_op: bool = False, **settings: Any) -> Any:
        if not args[0].is_cuda:
            return collective(*args, group=group, async_op=async_op, **settings)
        copies = [one.cpu() if isinstance(one, torch.Tensor) else one for one in args]
        collective(*copies, group=group, **settings)
        args[0].copy_(copies[0])
        return _Done() if async_op else None

    return call


def _on_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **settings: Any) -> Any:
        with torch.device("cpu"):
            return collective(*args, **settings)

    return call


def _full(tensor: torch.Tensor | None) -> torch.Tensor:
    """As ``tests.models.full``."""
    assert tensor is not None, "a trained parameter has no gradient"
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    parts: Sequence[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().detach().cpu())
    return torch.cat(list(parts), tensor.placements[-1].dim).to(tensor.device)


@contextmanager
def ranks_of_this_host() -> Iterator[None]:
    """Joins all ranks, each on a GPU of its own, or on CPUs."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    yield
