"""Cases of ranks that pose as several nodes: what travels between these crosses once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_laer.comm.base import Pending
from hf_laer.comm.groups import communicators
from hf_laer.comm.watch import Watch
from hf_laer.integrations.transformers import get_engine
from hf_laer.shard.exchange import SlotTable, start_reshard, start_unshard
from hf_laer.shard.home import Home, Layout, sharded_home
from hf_laer.shard.nodes import Nodes
from tests.engine.cases import batch_of, compare_gradients, equal_to_unpatched, loss_of, patched, world_mesh
from tests.models import assert_close, tiny_model
from tests.reports.steered import Steered

EXPERTS, WIDTH = 7, 2
CHOICES = (0, 2, 0, 2, 0, 4, 0, 6)
SHAPES = {"up": (EXPERTS, 10, 3), "down": (EXPERTS, 5)}


class Border:
    """A communicator that counts the elements that leave this rank's node."""

    def __init__(self, inner: Any, width: int) -> None:
        self.inner, self.size, self.rank, self._width, self.crossed = inner, inner.size, inner.rank, width, 0

    def start_all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        far = [count for q, count in enumerate(send) if q // self._width != self.rank // self._width]
        self.crossed += sum(far)
        return self.inner.start_all_to_all(tensor, send, receive)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def of_all(self) -> int:
        """Over all ranks, since the last call."""
        total = torch.tensor(self.crossed)
        dist.all_reduce(total)
        self.crossed = 0
        return int(total)


def random_tables(seed: int, ranks: int) -> tuple[SlotTable, SlotTable]:
    """What slots hold before, and what comes; sizes differ between ranks, and some get nothing."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(EXPERTS)[: rng.integers(0, EXPERTS + 1)].tolist() for _ in range(ranks)]
    cuts = [int(rng.integers(0, len(row) + 1)) if seed % 3 else 0 for row in rows]
    pairs = list(zip(rows, cuts, strict=True))
    return tuple(tuple(row[:cut]) for row, cut in pairs), tuple(tuple(row[cut:]) for row, cut in pairs)


def once(homes: dict[str, Home], table: SlotTable, before: SlotTable) -> int:
    """Elements that have to cross: each node's experts that it does not hold yet, as far as they live elsewhere."""
    total = 0
    for start in range(0, len(table), WIDTH):
        node = range(start, min(start + WIDTH, len(table)))
        there = {expert for rank in node for expert in before[rank]} if before else set()
        for expert in {expert for rank in node for expert in table[rank]} - there:
            for layout in (home.layout for home in homes.values()):
                far = [rank for rank in range(len(table)) if rank not in node and expert in layout.experts[rank]]
                each = int(np.prod(layout.shape[2:])) if len(layout.shape) > 2 else 1
                total += each * sum(len(layout.rows[rank]) for rank in far)
    return total


def exchange(dim: int, seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Unshard, in two parts, and reshard: against the whole parameters. Returns what crossed and what had to."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    comms = communicators(world_mesh(), ranks, Watch(), ranks_per_node=WIDTH)
    assert comms.node is not None
    nodes, border = Nodes(WIDTH, comms.node), Border(comms.weights, WIDTH)
    full = {name: torch.arange(float(np.prod(shape))).view(shape) + 1 for name, shape in SHAPES.items()}
    homes = {}
    for name, whole in full.items():
        layout = Layout.sharded(tuple(whole.shape), dim, ranks)
        homes[name] = sharded_home(layout.block(whole, me).clone(), layout, dim, world_mesh(), True)
    crossed = []
    for seed in seeds:
        before, table = random_tables(seed, ranks)
        rows = tuple((*there, *coming) for there, coming in zip(before, table, strict=True))
        slots = {name: torch.full((len(rows[me]), *whole.shape[1:]), -7.0) for name, whole in full.items()}
        kinds = torch.float32, torch.device("cpu")
        first = start_unshard(homes, before, border, *kinds, nodes=nodes)
        second = start_unshard(homes, table, border, *kinds, before=before, nodes=nodes)
        first.fill(slots)
        second.fill(slots)
        for name, whole in full.items():
            assert torch.equal(slots[name], whole[list(rows[me])]), (seed, name)
        crossed.append((border.of_all(), once(homes, before, ()) + once(homes, table, before)))
        crossed.append((_gradients(homes, rows, border, nodes, comms.replicas, seed), once(homes, rows, ())))
    return crossed


def _gradients(homes: dict[str, Home], rows: SlotTable, border: Border, nodes: Nodes, replicas: Any, seed: int) -> int:
    """Every rank's gradients, made alike everywhere, against their sum."""
    ranks, me = len(rows), border.rank
    random = np.random.default_rng(seed)
    made = {
        name: [torch.from_numpy(random.normal(size=(len(row), *home.layout.shape[1:]))).float() for row in rows]
        for name, home in homes.items()
    }
    told = torch.float32, 1 / ranks, nodes
    start_reshard(
        homes, {name: (own[me].clone(),) for name, own in made.items()}, rows, border, replicas, *told
    ).finish()
    for name, home in homes.items():
        total = torch.zeros(home.layout.shape)
        for row, own in zip(rows, made[name], strict=True):
            total.index_add_(0, torch.tensor(row, dtype=torch.int64), own)
        assert home.parameter.grad is not None
        assert_close(home.parameter.grad.to_local(), home.layout.block(total, me) / ranks, f"{seed} {name}")
        home.parameter.grad = None
    return border.of_all()


def equal_as_nodes(family: str, config: dict[str, Any]) -> dict[str, int]:
    """As :func:`equal_to_unpatched`, four ranks posing as two nodes; also how often something was passed on."""
    calls = 0

    def count(model: torch.nn.Module) -> None:
        node = get_engine(model).comms.node
        assert node is not None
        inner = node.all_to_all

        def counted(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return inner(*args)

        node.all_to_all = counted

    moved = equal_to_unpatched(family, {"ranks_per_node": WIDTH, **config}, prepare=count)
    return {**moved, "passed": calls}


def hot_expert_of_another_node(reduce_dtype: str | None = None) -> dict[str, int]:
    """``llep`` with half of all choices on the first rank's expert 0: both ranks of the other node help, one with
    expert 2 too.
    """
    model = patched(
        tiny_model("mixtral"), strategy="llep", ranks_per_node=WIDTH, max_rows_per_rank=None, reduce_dtype=reduce_dtype
    )
    engine = get_engine(model)
    border = Border(engine.comms.weights, WIDTH)
    engine.comms = engine.comms.__class__(engine.comms.tokens, border, engine.comms.replicas, engine.comms.node)
    steered, plain = Steered(model, [CHOICES]), Steered(tiny_model("mixtral"), [CHOICES])
    loss_of(model, batch_of(dist.get_rank())).backward()
    compare_gradients(steered.model, plain.gradients(0), tolerance=1e-5 if reduce_dtype is None else 1e-2)
    records = engine.recorder.drain()
    expert = sum(home.layout.shape[1] * home.layout.shape[2] for home in engine.layers[records[0].layer].homes.values())
    return {"crossed": border.of_all(), "expert": expert, "layers": len(engine.layers), "spilled": records[0].spilled}
