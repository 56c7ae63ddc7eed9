"""The kernels that write into other ranks' memory against their reference, posing as each rank in turn."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hf_laer.comm import places
from hf_laer.comm.base import Picked, Sums
from hf_laer.comm.peers import PeerCommunicator
from hf_laer.comm.places import Room, aligned
from hf_laer.compute.routing import Leaving, Shares, count, leave
from hf_laer.plan import chunk_owners


class Posed:
    """As an :class:`~hf_laer.comm.arena.Arena` of ranks that are not there."""

    def __init__(self, ranks: int, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]

    def of(self, rank: int) -> torch.Tensor:
        return self.blocks[rank]

    def meet(self) -> None:
        pass

    def mark(self) -> None:
        pass

    @contextmanager
    def aside(self, after: None, stream: int) -> Any:
        yield

    def wait(self, mark: None) -> None:
        pass


class _Nobody:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


def posed(ranks: int, rank: int, room: Room, words: int, device: str) -> PeerCommunicator:
    """A rank's communicator with memory of its own for all of them."""
    comm = PeerCommunicator(_Nobody(ranks, rank), words, torch.device(device), 60.0)  # type: ignore[arg-type]
    comm._room = room
    comm.use(Posed(ranks, 2 * ranks * (aligned(words * 8) + room.nbytes), device))
    return comm


def check_puts(tokens: int, top_k: int, experts: int, ranks: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    """Every byte that a rank writes anywhere, for rows with an index and without, and ahead of a plan."""
    room, words = Room(tokens, top_k, hidden * dtype.itemsize), experts + ranks
    generator = torch.Generator().manual_seed(tokens + ranks)
    # So few bits that no sum is rounded, which interpreter and device do in ways of their own.
    rows = torch.randint(-4, 4, (tokens, hidden), generator=generator).to(dtype)
    # The first rank's experts are chosen by nobody.
    likely = torch.tensor([float(owner > 0 or ranks == 1) for owner in chunk_owners(experts, ranks)])
    index = torch.multinomial(likely.expand(tokens, experts), top_k, generator=generator)
    gates = torch.rand(tokens, top_k, generator=generator)
    shares = Shares.of_owners(chunk_owners(experts, ranks), ranks, torch.device("cpu"))
    counted = count(index, experts)
    leaving = leave(index, gates, shares, counted)
    ends = leaving.ends[:, -1].tolist()
    sent = [stop - start for start, stop in zip([0, *ends], ends[:ranks], strict=False)]
    choices = [stop - start for start, stop in zip(ends[ranks - 1 :], ends[ranks:], strict=False)]

    # A row for each token, each the sum of two others and of one that is not there.
    table = torch.stack([torch.arange(tokens), torch.arange(tokens).flip(0), torch.full((tokens,), -1)], 1)
    weights, slots = 2.0 ** (torch.arange(tokens) % 3 - 1), torch.arange(tokens) % 3
    bias = torch.randint(-4, 4, (3, hidden), generator=generator).to(dtype)
    back = [min(n, tokens) for n in choices]

    def write(comm: PeerCommunicator) -> list[torch.Tensor]:
        def on(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(comm._arena.of(0).device)  # type: ignore[union-attr]

        here = Leaving(*map(on, leaving))
        # The second time there is no room.
        for some in (rows, torch.cat([rows, rows])):
            comm.start(on(some), here, top_k, on(counted.loads))
        comm.start_all_to_all(on(rows), sent, [0] * ranks, Picked(here.row_token[: sum(sent)]))
        comm.start_all_to_all(on(rows), back, [0] * ranks, Picked(here.row_token, here.ends))
        comm.start(on(rows), here, top_k)
        comm.start_all_to_all(here.message, choices, [0] * ranks)
        comm.start_all_to_all(on(rows)[: min(tokens, 3)], [0] * (ranks - 1) + [min(tokens, 3)], [0] * ranks)
        blocks = [block.cpu().clone() for block in comm._arena.blocks]  # type: ignore[union-attr]
        for block in comm._arena.blocks:  # type: ignore[union-attr]
            block.zero_()
        shares_of_rows = [tokens // ranks] * (ranks - 1) + [tokens - tokens // ranks * (ranks - 1)]
        sums = Sums(on(rows), on(table), dtype, on(weights), on(bias), on(slots))
        # From places that hold what this rank wrote to itself, and nothing from others.
        home = comm.start_sums(sums, shares_of_rows, back).summed(here.token_rows.clamp(max=sum(back) - 1), dtype, 0.5)
        blocks += [block.cpu() for block in comm._arena.blocks]  # type: ignore[union-attr]
        return [*blocks, home.cpu()]

    for rank in (0, ranks - 1):
        want = write(posed(ranks, rank, room, words, "cpu"))
        with patch.object(places, "usable", lambda tensor: True):
            got = write(posed(ranks, rank, room, words, device))
        for on, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(ours, theirs), f"rank {rank} writes otherwise on rank {on} of {ranks}"
        assert any(block.any() for block in want)
