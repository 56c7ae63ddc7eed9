"""What each method does in training: which loads it has seen when it places, and when its weights travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_laer import plan as planners
from hf_laer.plan import EMPTY, CostModel, Placement, Plan
from hf_laer.plan.forecast import HEDGE
from hf_laer.plan.validate import check_room


@dataclass(frozen=True)
class Setting:
    """What a replay holds fixed.

    Args:
        cost: Layer and machine.
        experts: E.
        slots: S, room for unsharded experts on a rank, of methods that re-lay out or copy.
        capacity_factor: LLEP's alpha.
        min_tokens: LLEP's m; ``None`` takes what a transfer is worth on this machine.
        threshold: LLEP's lambda.
        interval: Steps between re-placements of ``eplb``, ``lplb`` and ``smartmoe``, which move for good.
        history: Steps from which ``fsep`` and ``fsep+llep`` forecast; ``laer`` sums five, as published.
        forecast: How, as :mod:`hf_laer.plan.forecast` knows it, or ``auto``.
        group: Tokens stay inside groups of so many ranks (``laer``, ``fsep`` and ``fsep+llep``); ``None``: all ranks.
        hedge: Thousandths of the expected loads that ``fsep`` and ``fsep+llep`` replace by their mean; a replay
            sets it by how much the forecast has missed.
        recent: The latest loads ``[1, E]``, for which owners' replicas are placed too; set by a replay.
        guard: Whether ``llep`` falls back to ``ep``, and ``fsep+llep`` to ``fsep``, where spilling is predicted
            not to pay.
    """

    cost: CostModel
    experts: int
    slots: int
    capacity_factor: float = 1.0
    min_tokens: int | None = None
    threshold: float = 1.3
    interval: int = 20
    history: int = 8
    forecast: str = "auto"
    guard: bool = True
    group: int | None = None
    hedge: int = HEDGE
    recent: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        if self.group is not None and (self.group < 1 or self.ranks % self.group):
            raise ValueError(f"groups of {self.group} ranks do not divide {self.ranks}")
        check_room(self.experts, self.group or self.ranks, self.slots)
        for name in ("interval", "history"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def within_group(self) -> Setting:
        """The same for the ranks of one group."""
        machine = replace(self.cost.topology, num_ranks=self.group or self.ranks)
        return replace(self, cost=replace(self.cost, topology=machine), group=None)

    @property
    def ranks(self) -> int:
        return self.cost.topology.num_ranks

    @property
    def width(self) -> int:
        return self.cost.topology.width

    @property
    def owners(self) -> np.ndarray:
        return planners.chunk_owners(self.experts, self.ranks)

    def ideal_seconds(self, loads: np.ndarray) -> float:
        """The force-balanced run's time: ``ep`` over all ranks or ``fsdp_ep`` in groups, the faster."""
        even = np.full(loads.shape, int(loads.sum()) // loads.size)
        grouped = planners.predict(planners.fsdp_ep(even, self.slots), even, self.cost, home="copies").predicted
        assert grouped is not None
        return min(planners.balanced_ideal(even, self.cost).seconds, grouped.seconds)

    @property
    def least(self) -> int:
        return self.cost.transfer_tokens() if self.min_tokens is None else self.min_tokens


@dataclass(frozen=True)
class Method:
    """One method under replay.

    Args:
        plan: Loads of this step, and the state, to a plan.
        home: Where weights live, as :func:`hf_laer.plan.predict` knows it.
        start: The state before anything is known; a :class:`Placement` or owners.
        place: Recent loads ``[N, E]`` summed, or those to expect of each group ``[G, E]``, and the state to the next
            state.
        window: How many steps are summed; ``None`` where the next step's loads are forecast.
        every: Whether it places each step, else each ``Setting.interval`` steps.
        foreseen: Whether weights of the state's placement travel ahead.
    """

    plan: Callable[[np.ndarray, object, Setting], Plan]
    home: str
    start: Callable[[Setting], object] | None = None
    place: Callable[[np.ndarray, object, Setting], object] | None = None
    window: Callable[[Setting], int] | None = lambda setting: 1
    every: bool = True
    foreseen: bool = False

    def seen(self, loads: np.ndarray, setting: Setting) -> np.ndarray:
        """What is kept of a step's loads ``[N, E]`` to place by: where they are forecast, each group's ``[G, E]``."""
        if self.window is not None:
            return loads
        return np.add.reduceat(loads, np.arange(0, len(loads), setting.group or len(loads)), axis=0)

    def moved(self, before: object, after: object) -> int:
        """Experts that changed their home for good between two states."""
        if self.home == "resident" and isinstance(before, Placement) and isinstance(after, Placement):
            return int((_held(after) & ~_held(before)).sum())
        if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
            return int((before != after).sum())
        return 0


def _held(placement: Placement) -> np.ndarray:
    slots = placement.slots
    held = np.zeros((len(slots), int(slots.max()) + 2), bool)
    np.put_along_axis(held, np.where(slots == EMPTY, held.shape[1] - 1, slots), True, axis=1)
    return held[:, :-1]


def _even_start(setting: Setting) -> Placement:
    return planners.initial_placement(setting.experts, setting.ranks, setting.slots, setting.width)


def _placement(state: object) -> Placement:
    assert isinstance(state, Placement)
    return state


def _owners(state: object) -> np.ndarray:
    assert isinstance(state, np.ndarray)
    return state


def _llep(loads: np.ndarray, state: object, setting: Setting) -> Plan:
    return planners.llep(
        loads,
        setting.owners,
        capacity_factor=setting.capacity_factor,
        min_tokens_per_gemm=setting.least,
        imbalance_threshold=setting.threshold,
        ranks_per_node=setting.width,
        cost=setting.cost if setting.guard else None,
    )


def _llep_home(loads: np.ndarray, state: object, setting: Setting) -> Plan:
    """As the engine's ``llep``: the cheapest of its plans; without the cost model tokens stay wherever they can."""
    told: dict[str, Any] = {
        "capacity_factor": setting.capacity_factor,
        "min_tokens_per_gemm": setting.least,
        "ranks_per_node": setting.width,
    }
    if not setting.guard:
        return planners.llep_at_home(loads, setting.owners, **told)
    plans = planners.spilling_plans(loads, setting.owners, **told)
    return planners.cheapest(plans, loads, setting.cost, home="whole", owners=setting.owners)


def _fsep_llep(loads: np.ndarray, state: object, setting: Setting) -> Plan:
    return planners.fsep_llep(
        loads,
        _placement(state),
        setting.width,
        capacity_factor=setting.capacity_factor,
        min_tokens_per_gemm=setting.least,
        cost=setting.cost if setting.guard else None,
    )


def _llep_ahead(loads: np.ndarray, state: object, setting: Setting) -> Plan:
    return planners.llep_ahead(
        loads,
        setting.owners,
        _placement(state),
        capacity_factor=setting.capacity_factor,
        min_tokens_per_gemm=setting.least,
        ranks_per_node=setting.width,
        cost=setting.cost if setting.guard else None,
    )


def _laer_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    return planners.laer_placement(loads, setting.ranks, setting.slots, setting.width)


def _fsep_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    total = loads.sum(axis=0)
    return planners.fsep_placement(total, setting.ranks, setting.slots, setting.width, hedge_permille=setting.hedge)


def _replica_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    return planners.replica_placement(
        loads.sum(axis=0),
        setting.owners,
        setting.ranks,
        setting.slots,
        setting.width,
        recent=[loads.sum(axis=0) for loads in setting.recent],
        capacity_factor=setting.capacity_factor,
        min_tokens_per_gemm=setting.least,
        cost=setting.cost if setting.guard else None,
        hedge_permille=setting.hedge,
    )


def _eplb_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    return planners.eplb_placement(loads, setting.ranks, setting.slots, setting.width)


def _flexmoe_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    return planners.flexmoe_placement(loads, _placement(state), move_tokens=2 * setting.cost.transfer_tokens())


def _prophet_place(loads: np.ndarray, state: object, setting: Setting) -> Placement:
    worth = setting.cost.transfer_tokens(setting.cost.topology.nodes > 1)
    return planners.prophet_placement(loads, setting.owners, transfer_tokens=worth)


def _owned(setting: Setting) -> Placement:
    return planners.ep(np.zeros((setting.ranks, setting.experts), np.int64), setting.owners).placement


METHODS: dict[str, Method] = {
    "ep": Method(lambda loads, state, s: planners.ep(loads, s.owners), "whole"),
    "fsdp": Method(lambda loads, state, s: planners.fsdp(loads), "sharded"),
    "fsdp_ep": Method(lambda loads, state, s: planners.fsdp_ep(loads, s.slots), "copies"),
    "llep": Method(_llep, "whole"),
    "llep+home": Method(_llep_home, "whole"),
    "laer": Method(
        lambda loads, state, s: planners.laer(loads, _placement(state), s.width),
        "sharded",
        _even_start,
        _laer_place,
        window=lambda s: 5,
    ),
    "fsep": Method(
        lambda loads, state, s: planners.fsep(loads, _placement(state), s.width),
        "sharded",
        _even_start,
        _fsep_place,
        window=None,
    ),
    "fsep+llep": Method(_fsep_llep, "sharded", _even_start, _fsep_place, window=None, foreseen=True),
    "fsep+llep:whole": Method(_llep_ahead, "whole", _owned, _replica_place, window=None, foreseen=True),
    "eplb": Method(
        lambda loads, state, s: planners.eplb(loads, _placement(state)),
        "resident",
        _even_start,
        _eplb_place,
        window=lambda s: s.interval,
        every=False,
    ),
    "lplb": Method(
        lambda loads, state, s: planners.lplb(loads, _placement(state), s.width),
        "resident",
        _even_start,
        _eplb_place,
        window=lambda s: s.interval,
        every=False,
    ),
    "fastermoe": Method(
        lambda loads, state, s: planners.fastermoe(
            loads, s.owners, transfer_tokens=s.cost.transfer_tokens(s.cost.topology.nodes > 1)
        ),
        "shadowed",
    ),
    "smartmoe": Method(
        lambda loads, state, s: planners.smartmoe(loads, _owners(state)),
        "whole",
        lambda s: s.owners,
        lambda loads, state, s: planners.smartmoe_owners(loads, _owners(state), s.ranks),
        window=lambda s: s.interval,
        every=False,
    ),
    "flexmoe": Method(
        lambda loads, state, s: planners.flexmoe(loads, _placement(state)),
        "resident",
        _even_start,
        _flexmoe_place,
    ),
    "prophet": Method(
        lambda loads, state, s: planners.prophet(loads, _placement(state), s.owners),
        "whole",
        _owned,
        _prophet_place,
        foreseen=True,
    ),
}


def grouped(method: Method, setting: Setting) -> Method:
    """``method`` in each of the setting's groups by itself; a placement of all ranks is the groups', stacked.

    Every group holds every expert, so weights live sharded over all ranks and are unsharded into each group: those of
    ``ep`` and ``llep`` too, at the group's owners. What a method weighs while it plans, it weighs with the group's
    links; the prediction is the whole world's.

    Raises:
        ValueError: A method whose experts live for good in slots or at owners of the whole world.
    """
    if not _groupable(method):
        able = [name for name, one in METHODS.items() if _groupable(one)]
        raise ValueError(f"groups are for {', '.join(able)}: the others' experts have a home in the whole world")
    one, start, place = setting.within_group(), method.start or _owned, method.place
    groups = [slice(at, at + one.ranks) for at in range(0, setting.ranks, one.ranks)]

    def rows(state: object) -> list[Placement]:
        return [Placement(_placement(state).slots[group]) for group in groups]

    def place_all(loads: np.ndarray, state: object, given: Setting) -> Placement:
        assert place is not None
        hedged = replace(one, hedge=given.hedge)
        placed = [place(loads[at], old, hedged) for at, old in zip(groups, rows(state), strict=True)]
        return planners.stack_groups([_placement(new) for new in placed])

    def plan_all(loads: np.ndarray, state: object, _: Setting) -> Plan:
        plans = [method.plan(loads[at], old, one) for at, old in zip(groups, rows(state), strict=True)]
        return planners.join_groups(plans, loads)

    return replace(
        method,
        plan=plan_all,
        home="sharded" if method.home == "whole" else method.home,
        start=lambda _: planners.stack_groups([_placement(start(one))] * len(groups)),
        place=place_all if place else None,
        foreseen=method.foreseen or method.home == "whole",
    )


def _groupable(method: Method) -> bool:
    return method.home in ("sharded", "copies") or (method.home == "whole" and method.start is None)


def get_method(name: str) -> Method:
    """The method called ``name``.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if name not in METHODS:
        raise ValueError(f"no planner {name!r}; there are {', '.join(METHODS)}, lower_bound")
    return METHODS[name]
