"""The tuner: versions that all ranks agree on, the best forecast, nothing done where nothing is to be won."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hf_laer.config import LaerConfig
from hf_laer.plan import begins_with_owned, chunk_owners, fsep
from hf_laer.tuner import LayerTuner
from tests.engine import cases_tuner

RANKS, EXPERTS = 2, 5


class Held:
    """An executor that works only when told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future, object]] = []

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        self.waiting.append((future, lambda: function(*args)))
        return future

    def work(self) -> None:
        for future, job in self.waiting:
            future.set_result(job())
        self.waiting = []


def tuner(pool, **settings) -> LayerTuner:
    config = LaerConfig(**{"strategy": "fsep", "slots_per_rank": 3, "history": 4, **settings})
    return LayerTuner(config, EXPERTS, [range(RANKS)], 8, pool)


def loads_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 1000, (RANKS, EXPERTS)) ** 2


def step(ranks: list[LayerTuner], loads: np.ndarray) -> list[list[np.ndarray]]:
    """One micro-batch on every rank, as the engine does it; the layouts used."""
    told = np.array([rank.newest() for rank in ranks], np.int64)
    for rank in ranks:
        rank.agree(told[:, 0], told[:, 1])
    layouts = [rank.layout for rank in ranks]
    for rank, layout in zip(ranks, layouts, strict=True):
        rank.observe(loads, [fsep(loads, layout[0])])
    return [[placement.slots for placement in layout] for layout in layouts]


def test_all_use_the_layout_that_the_slowest_has() -> None:
    fast, slow = Held(), Held()
    ranks = [tuner(fast), tuner(slow)]
    first = step(ranks, loads_of(0))[0][0]
    fast.work()
    for at in range(1, 5):
        for layout in step(ranks, loads_of(at)):
            assert (layout[0] == first).all(), "a rank went ahead of the other"
        fast.work()
    slow.work()
    one, other = (layout[0] for layout in step(ranks, loads_of(5)))
    assert (one == other).all()
    assert (one != first).any(), "the layouts that were made late are never used"


def test_versions_under_way_are_bounded() -> None:
    pool = Held()
    ranks = [tuner(pool)]
    for at in range(20):
        step(ranks, loads_of(at))
    assert len(pool.waiting) <= 2


def test_ranks_that_disagree_are_told() -> None:
    ranks = [tuner(Held()), tuner(Held())]
    with pytest.raises(RuntimeError, match=r"ranks \[1\]"):
        ranks[0].agree(np.array([0, 0]), np.array([ranks[0].newest()[1], 7]))


def test_deterministic_runs_wait_for_the_newest() -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait)
        ranks = [tuner(pool)]
        step(ranks, loads_of(0))
        assert ranks[0].newest()[0] == 0
        gate.set()
        torch.use_deterministic_algorithms(True)
        try:
            assert ranks[0].newest()[0] == 1
        finally:
            torch.use_deterministic_algorithms(False)


def test_level_loads_start_no_work() -> None:
    pool = Held()
    for _ in range(3):
        step([tuner(pool, slots_per_rank=5)], loads_of(0))
    assert not pool.waiting


def test_level_layouts_follow_loads_that_move() -> None:
    """A layout may level loads that it was not made for, once; the next ones it may not."""
    pool = Held()
    made = tuner(pool, slots_per_rank=4)
    even = np.full((RANKS, EXPERTS), 1000)
    step([made], even)
    assert not pool.waiting
    moved = even + np.array([300, 0, 0, 0, 0])
    level = fsep(moved, made.layout[0]).rank_loads
    assert level.max() - level.min() <= 1
    step([made], moved)
    assert len(pool.waiting) == 1


@pytest.mark.parametrize(
    ("series", "best"),
    [
        ([1000, 5000] * 8, ("mean", "ema")),
        (list(range(100, 1700, 100)), ("trend",)),
    ],
    ids=["to and fro", "a line"],
)
def test_the_forecast_that_missed_least(series: list[int], best: tuple[str, ...]) -> None:
    made = tuner(Held(), forecast="auto")
    for value in series:
        loads = np.full((RANKS, EXPERTS), 1000)
        loads[:, 0] = value
        step([made], loads)
    assert made.forecast in best


def test_memory_goes_on_with_other_ranks() -> None:
    pool = Held()
    before = tuner(pool)
    for at in range(3):
        step([before], loads_of(at))
        pool.work()
    same, other = tuner(pool), LayerTuner(LaerConfig(strategy="fsep", slots_per_rank=2), EXPERTS, [range(3)], 8, pool)
    memory = before.state_dict()
    for resumed in (same, other):
        resumed.load_state_dict(memory)
        assert resumed.forecast == before.forecast
    assert same.layout[0].slots.tolist() == memory["placements"][0]
    blank = LayerTuner(LaerConfig(strategy="fsep", slots_per_rank=2), EXPERTS, [range(3)], 8, pool)
    hot = int(np.sum([loads_of(at) for at in range(3)], (0, 1)).argmax())
    copies = [int((made.layout[0].slots == hot).sum()) for made in (other, blank)]
    assert copies[0] > copies[1], "the loads seen before are forgotten"


def test_memory_of_experts_that_lived_otherwise() -> None:
    """A layout for slices is none for owners, and the other way round; the loads are remembered."""
    pool = Held()
    kinds = {homes: {"strategy": "fsep+llep", "expert_homes": homes} for homes in ("whole", "sharded")}
    memories = {}
    for homes, kind in kinds.items():
        before = tuner(pool, slots_per_rank=4, **kind)
        for at in range(3):
            step([before], loads_of(at))
            pool.work()
        memories[homes] = before.state_dict()
    owners = chunk_owners(EXPERTS, RANKS)
    for saved, taken in itertools.product(kinds, kinds):
        resumed = tuner(pool, slots_per_rank=4, **kinds[taken])
        resumed.load_state_dict(memories[saved])
        assert begins_with_owned(resumed.layout[0], owners) or taken == "sharded"
        assert len(resumed._forecaster.history) == 3
        assert resumed.layout[0].slots.tolist() == memories[taken]["placements"][0]
    # What claims to be for owners and is not.
    liar = dict(memories["sharded"], homes="whole")
    resumed = tuner(pool, slots_per_rank=4, **kinds["whole"])
    resumed.load_state_dict(liar)
    assert begins_with_owned(resumed.layout[0], owners)


@pytest.mark.parametrize("homes", ["sharded", pytest.param("whole", marks=pytest.mark.long)])
def test_late_ranks_keep_the_others_collectives(ranks, homes: str) -> None:
    results = ranks(3).run(cases_tuner.late, strategy=f"fsep+llep:{homes}")
    assert all(result == results[0] for result in results)
    assert results[0]["moved"] > 0
