"""Routing kernels against their reference: the tables of a whole exchange, posing as each rank in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_laer.comm.routes import most_rows
from hf_laer.compute.grouped_gemm import Arrangement
from hf_laer.compute.routing import (
    Arrived,
    Counted,
    Leaving,
    arrive,
    count,
    leave,
    row_counts,
    rows_both_ways,
    shares_and_rows,
)
from hf_laer.plan import Plan, chunk_owners, fsep, fsep_placement, llep, llep_at_home, own_part

KINDS = ("llep", "at home", "fsep")


def _plan_of(kind: str, loads: np.ndarray) -> Plan:
    """With replicas once each in rank order, or in as many ranges as keep tokens on their ranks."""
    ranks, experts = loads.shape
    if kind == "fsep":
        return fsep(loads, fsep_placement(loads, ranks, min(experts, -(-experts // ranks) + 2)))
    told: dict[str, Any] = {"owners": chunk_owners(experts, ranks), "min_tokens_per_gemm": 1}
    return llep(loads, **told, imbalance_threshold=1.0) if kind == "llep" else llep_at_home(loads, **told)


def check_exchange(
    tokens: int, top_k: int, experts: int, ranks: int, skew: float, kind: str = "llep", device: str = "cpu"
) -> None:
    """Tables of what leaves each of some ranks and of what arrives there, by the kernels on ``device``."""
    from hf_laer.compute.kernels import routing as kernels

    generator = torch.Generator().manual_seed(tokens + ranks)
    popularity = torch.arange(1.0, experts + 1) ** -skew
    many = [tokens if rank != 1 else 1 for rank in range(ranks)]
    index = [torch.multinomial(popularity.expand(n, experts), top_k, generator=generator) for n in many]
    loads = np.stack([count(one, experts).loads.numpy() for one in index])
    plan = _plan_of(kind, loads)
    own = [own_part(plan, loads, rank) for rank in range(ranks)]
    messages, edges, places_of = [], [], []
    for rank, one in enumerate(index):
        weights = torch.rand(one.shape, generator=generator)
        # Large groups last, in two stacks.
        counts = own[rank].slots.tolist()
        arrangement = Arrangement.of(counts, (len(counts) // 2, -(-len(counts) // 2)), max(1, tokens // 4))
        told = plan.split, loads[:rank].sum(0), own[rank], arrangement
        shares, rows_of = shares_and_rows(*told, torch.device("cpu"))
        places_of.append(rows_of.slots[0])
        want = leave(one, weights, shares, count(one, experts))
        counted = Counted(*kernels.count(one.to(device), experts))
        assert counted.loads.tolist() == loads[rank].tolist()
        there, _ = shares_and_rows(*told, torch.device(device))
        got = Leaving(*kernels.leave(one.to(device), weights.to(device), there, counted.ends))
        leaving_rows = int(row_counts(want.message, rows_of.edges[0]).sum())
        _check_equal(want, got, row_token=leaving_rows)
        # With room for more rows than there are.
        starts = 2 * own[rank].sent.cumsum() - own[rank].sent
        starts = torch.from_numpy(starts).int()
        want_apart = leave(one, weights, shares, count(one, experts), starts)
        got_apart = kernels.leave(one.to(device), weights.to(device), there, counted.ends, starts.to(device))
        _check_equal(want_apart, Leaving(*got_apart), row_token=leaving_rows)
        assert torch.equal(want_apart.message, want.message)
        messages.append(want.message.split(own[rank].sent.tolist()))
        edges.append(rows_of.edges)
    for rank in range(ranks):
        received = torch.cat([message[rank] for message in messages])
        sent = torch.cat(messages[rank])
        rows = rows_both_ways(sent, received, edges[rank])
        here = [one.to(device) for one in (sent, received, edges[rank], places_of[rank])]
        assert torch.equal(kernels.rows_both_ways(*here[:3]).cpu(), rows)
        arriving, bound = int(rows[1].sum()), int(most_rows(loads.sum(1) // top_k, own[rank]).sum())
        assert arriving <= bound <= len(received)
        if len(received):
            want = arrive(received, edges[rank][1], bound, top_k, places_of[rank])
            got = Arrived(*kernels.arrive(here[1], here[2][1], bound, top_k, here[3]))
            _check_equal(want, got, row_places=arriving)
            room = torch.from_numpy(own[rank].received)
            starts, bound = (room.cumsum(0) - room).int(), len(received)
            want = arrive(received, edges[rank][1], bound, top_k, places_of[rank], starts)
            got = Arrived(*kernels.arrive(here[1], here[2][1], bound, top_k, here[3], starts.to(device)))
            _check_equal(want, got)


def _check_equal(want: Leaving | Arrived, got: Leaving | Arrived, **valid: int) -> None:
    for name in want._fields:
        ours, theirs = (getattr(tables, name)[: valid.get(name)].cpu() for tables in (got, want))
        if name == "ends":
            # In how many blocks is the kernel's own affair.
            ours, theirs = ours[: len(theirs), -1].long(), theirs[:, -1]
        assert torch.equal(ours, theirs), f"{name}: {ours} instead of {theirs}"
