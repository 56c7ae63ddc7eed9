"""What rank processes run for tokens that travel through memory that ranks share."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hf_laer.comm import arena, peers
from hf_laer.comm.base import Picked
from hf_laer.comm.peers import PeerCommunicator
from hf_laer.comm.places import Placed, Places, Room
from hf_laer.comm.process_group import ProcessGroupCommunicator
from hf_laer.comm.watch import Watch
from hf_laer.compute.routing import Shares, count, leave
from hf_laer.integrations.transformers import get_engine
from hf_laer.plan import chunk_owners
from tests.engine import cases, cases_waits
from tests.engine.cases_peers import _Refused
from tests.models import assert_close, tiny_model

_mapped, _next, _from_file = arena._mapped, PeerCommunicator._next, torch.from_file


def _mapped_full_of_nan(path: str, nbytes: int) -> torch.Tensor:
    is_new = not Path(path).exists()
    found = _mapped(path, nbytes)
    return found.fill_(255) if is_new else found


def _next_after_nan(comm: PeerCommunicator) -> int:
    """What came before has been taken out of its places, and nobody writes there until all have met once more."""
    turn, memory = _next(comm), comm._arena
    assert memory is not None
    memory.of(comm.rank).view(2, -1)[1 - turn].fill_(255)
    return turn


def counted(call: Callable[[], Any]) -> Counter[str]:
    """What of these a call does, where all memory that says nothing yet, or nothing any more, is full of NaN."""
    found: Counter[str] = Counter()
    ways = {
        "put": (Places, "put"),
        "all": (Places, "put_all"),
        "rows": (Placed, "rows"),
        "made": (peers, "make_arena"),
        "sent": (ProcessGroupCommunicator, "start_all_to_all"),
    }

    def counting(what: str, was: Any) -> Any:
        def counted_call(*args: Any, **kw: Any) -> Any:
            found[what] += 1
            return was(*args, **kw)

        return counted_call

    with ExitStack() as stack:
        stack.enter_context(patch.object(arena, "_mapped", _mapped_full_of_nan))
        stack.enter_context(patch.object(PeerCommunicator, "_next", _next_after_nan))
        for what, (owner, name) in ways.items():
            stack.enter_context(patch.object(owner, name, counting(what, getattr(owner, name))))
        call()
    return found


def equal(family: str, strategy: str, checkpointing: bool = False, **config: Any) -> dict[str, int]:
    """Loss, logits and every gradient over some steps; what was put, and what was sent in spite of it."""

    def checkpointed(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    told = {"strategy": strategy, "history": 1, "peer_memory": True, **config}
    prepare = checkpointed if checkpointing else None
    return dict(counted(lambda: cases.equal_to_unpatched(family, told, prepare)))


def routed(strategy: str, routings: str, **config: Any) -> dict[str, int]:
    """One block whose ranks have more tokens, fewer and none in turns: output and every gradient."""
    return dict(counted(lambda: cases_waits.waits(strategy, routings, peer_memory=True, **config)))


def refused(allocated: bool) -> dict[str, int]:
    """Where one rank cannot share its memory, or has none to spare, tokens are sent, and nobody asks again."""
    way = patch.object(arena, "SharedArena", _Refused) if allocated else patch.object(arena.torch, "from_file", _full)
    with way, patch.object(arena.logger, "warning"):
        return routed("ep", "sshs")


def _full(path: str, **kw: Any) -> torch.Tensor:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("no memory")
    return _from_file(path, **kw)


def exchanges(steps: int) -> None:
    """Exchanges of all kinds and sizes, some of them not waited for at once, against those of the process group."""
    inner = ProcessGroupCommunicator(dist.group.WORLD, "tokens", Watch())
    comm = PeerCommunicator(inner, 16, torch.device("cpu"), 60.0)
    rank, size = comm.rank, comm.size
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        counts = torch.randint(0, 4, (size, size), generator=generator)
        comm.reserve(3, 1 + step % 4, 8 * (1 + step % 3))
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        dtype = (torch.float32, torch.bfloat16, torch.int32)[step % 3]
        tensor = torch.arange(2 * sum(send)).view(-1, 2).add(1000 * rank).to(dtype)
        index = Picked(torch.randperm(len(tensor), generator=generator)) if step % 2 else None
        first = comm.start_all_to_all(tensor, send, receive, index)
        # The next one begins before this one is waited for.
        second = comm.start_all_to_all(tensor[:, :1], send, receive)
        told = comm.all_gather(torch.arange(3) + 10 * rank)
        want = inner.start_all_to_all(tensor, send, receive, index).wait()
        assert torch.equal(second.wait(), inner.all_to_all(tensor[:, :1], send, receive))
        assert torch.equal(first.wait(), want)
        assert torch.equal(told, torch.arange(3) + 10 * torch.arange(size).unsqueeze(1))


def ahead(experts: int, top_k: int) -> list[bool]:
    """Tells and puts before anything is known of others, each time with more tokens on one rank; who had room.

    All that every rank gets is what messages would have brought.
    """
    inner = ProcessGroupCommunicator(dist.group.WORLD, "tokens", Watch())
    comm = PeerCommunicator(inner, experts + dist.get_world_size(), torch.device("cpu"), 60.0)
    comm.reserve(6, top_k, 20)
    shares = Shares.of_owners(chunk_owners(experts, comm.size), comm.size, torch.device("cpu"))
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        tokens = torch.randn((comm.rank + 2 * step) % 7 + 2 * (step == 3), 5, generator=generator)
        index = torch.rand(len(tokens), experts, generator=generator).topk(top_k).indices
        counts = count(index, experts)
        leaving = leave(index, torch.rand(len(tokens), top_k, generator=generator), shares, counts)
        put = comm.start(tokens, leaving, top_k, counts.loads)
        assert put is not None
        told = inner.all_gather(torch.cat([counts.loads, leaving.ends[: comm.size, -1]]))
        assert torch.equal(put.told, told)
        most = int(told[:, :experts].sum(1).max()) // top_k
        found.append(put.holds(most))
        if found[-1]:
            _compare(comm, inner, put, leaving, tokens, told, shares)
        comm.reserve(6, top_k, 20)
    return found


def _compare(
    comm: PeerCommunicator,
    inner: ProcessGroupCommunicator,
    put: Placed,
    leaving: Any,
    tokens: torch.Tensor,
    told: torch.Tensor,
    shares: Shares,
) -> None:
    size, experts = comm.size, shares.experts
    owners = torch.from_numpy(chunk_owners(experts, size))
    choices = torch.stack([told[:, :experts][:, owners == rank].sum(1) for rank in range(size)], 1)
    rows = told[:, experts:].diff(dim=1, prepend=torch.zeros(size, 1, dtype=torch.int64))
    messages, arriving = (
        put.messages(choices[:, comm.rank].tolist()),
        put.rows(rows[:, comm.rank].tolist()),
    )
    sent = inner.all_to_all(leaving.message, choices[comm.rank].tolist(), choices[:, comm.rank].tolist())
    assert torch.equal(messages.wait(), sent)
    there = tokens[leaving.row_token[: int(rows[comm.rank].sum())]]
    assert torch.equal(arriving.wait(), inner.all_to_all(there, rows[comm.rank].tolist(), rows[:, comm.rank].tolist()))


def room_grows() -> list[tuple[int, ...]]:
    """The room after each of some wishes."""
    inner = ProcessGroupCommunicator(dist.group.WORLD, "tokens", Watch())
    comm, found = PeerCommunicator(inner, 4, torch.device("cpu"), 60.0), []
    for wish in (Room(8, 2, 16), Room(4, 2, 16), Room(9, 2, 16), Room(1, 3, 8)):
        comm.reserve(*wish)
        found.append((*comm._room, comm.nbytes))
    return found


def with_engine(strategy: str, **config: Any) -> bool:
    """Whether a patched model's tokens go through memory."""
    model = tiny_model("mixtral")
    cases.patched(model, strategy=strategy, **config)
    engine = get_engine(model)
    assert engine is not None
    return isinstance(engine.comms.tokens, PeerCommunicator)


def no_more_room() -> list[bool]:
    """Memory is refused when a larger evaluation asks for more, between a forward and its backward.

    Whether it was there before, and is afterwards.
    """
    rank, family = dist.get_rank(), "qwen3_moe"
    model, found = cases.patched(tiny_model(family), strategy="llep", peer_memory=True), []
    engine = get_engine(model)
    assert engine is not None
    comm = engine.comms.tokens
    # The second step's tokens meet places that are there, whatever is spilled.
    for step in range(2):
        want = cases.expected(family, step)
        model.zero_grad()
        loss = cases.loss_of(model, cases.batch_of(rank, step))
        found.append(comm.can_start)
        if step == 1:
            blocks = [weakref.ref(block) for block in comm._arena._blocks]  # type: ignore[attr-defined]
            with torch.no_grad(), patch.object(peers, "make_arena", return_value=None):
                model(input_ids=torch.cat([cases.batch_of(rank, step)] * 3))
            found += [comm.can_start, comm.nbytes > 0, any(block() is not None for block in blocks)]
        loss.backward()
        cases.compare_gradients(model, want.gradients)
    return found


def after_inference() -> None:
    """Memory that an evaluation in inference mode asked for is written to in training."""
    rank, family = dist.get_rank(), "mixtral"
    model, want = cases.patched(tiny_model(family), strategy="ep", peer_memory=True), cases.expected(family)
    with torch.inference_mode():
        assert_close(model(input_ids=cases.batch_of(rank)).logits, want.logits, "evaluation")
    cases.loss_of(model, cases.batch_of(rank)).backward()
    cases.compare_gradients(model, want.gradients)
