"""Which strategy suits a layer: each one's plans for likely loads, and what they are predicted to cost.

Everything is a pure function of whole numbers and of a profile's figures, in a fixed order, so ranks choose alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hf_laer.config import AUTO, FIXED_HOMES, FSDP2, HOMES, STRATEGIES, UNION, LaerConfig
from hf_laer.loads import Loads, hot_loads, usual_loads
from hf_laer.plain import fsdp2
from hf_laer.plan import (
    CostModel,
    Placement,
    Plan,
    Prediction,
    Topology,
    cheapest,
    chunk_owners,
    ep,
    fsdp,
    fsep,
    fsep_llep,
    fsep_placement,
    join_groups,
    llep,
    llep_ahead,
    predict,
    replica_placement,
    spilling_plans,
    stack_groups,
    used,
)
from hf_laer.profile import Profile

logger = logging.getLogger(__name__)

# Where predictions are as good as equal, the earlier one: it corrects what the loads turn out to be, for the least
# weights on their way.
PREFERENCE = ("llep", "fsep+llep", "fsep", "fsdp", "ep")
ALIKE = 1.02
# A layer is taken from plain FSDP2 only where that is predicted to be slower than this times the best.
WORTH = 1.03
# Where no strategy fits, the memory of a layer that still counts as the least.
ABOUT = 1.1
# Tokens per rank and micro-batch where nothing is known of them.
USUAL_TOKENS = 8192
# K, where a model does not say it.
USUAL_TOP_K = 2
# Of a device's memory, what the homes and one layer under way may take; the rest of the model needs some too.
ROOM = 0.8
# Bytes per expert parameter at rest: fp32 weight, gradient and AdamW's two moments.
HOME_BYTES = 16
# The part of the host's time that is the forward's, which a recompute repeats (3.4 to 4.7 of 6 ms on two H200).
FORWARD = 0.6


@dataclass(frozen=True)
class LayerSizes:
    """One MoE layer.

    Args:
        experts: E.
        hidden: H.
        intermediate: I.
        top_k: K.
        gated: Three matrices per expert instead of two.
        value_bytes: Bytes of a value in compute dtype.
        reduce_bytes: Bytes of a weight gradient's value on its way; ``None`` means ``value_bytes``, 0 that the experts
            are frozen.
        recompute: Under activation checkpointing ``layer`` or ``experts``, as the config says; else ``none``.
        looped: The model's own implementation runs expert by expert (``eager``), which the host pays for each.

    Raises:
        ValueError: A size is below 1, or K above E.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    gated: bool = True
    value_bytes: int = 2
    reduce_bytes: int | None = None
    recompute: str = "none"
    looped: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "intermediate", "top_k", "value_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is more than the {self.experts} experts")

    def cost(self, machine: Topology, tokens: int, max_rows: int | None = None) -> CostModel:
        """The layer's cost model on a machine; ``tokens`` per rank say how long attention covers what travels."""
        kinds: dict[str, Any] = {"gated": self.gated, "value_bytes": self.value_bytes, "max_rows_per_rank": max_rows}
        kinds |= {"reduce_bytes": self.reduce_bytes, "recompute": self.recompute}
        other = attention_seconds(machine, self.hidden, tokens)
        return CostModel(machine, self.hidden, self.intermediate, self.top_k, other_seconds=other, **kinds)


@dataclass(frozen=True)
class Alternative:
    """One strategy, predicted for one layer: means over the loads that were asked about, memory of the worst.

    Args:
        strategy: One of ``STRATEGIES``, or ``FSDP2``.
        config: The settings that it was predicted with.
        seconds: Forward and backward, not less than the host needs.
        compute: Products and the copies around them, seconds.
        tokens: Their exchanges.
        weights: Weights and gradients on their way that nothing hides.
        hidden: Those that compute hides.
        peak_bytes: Unsharded weights, gradients, rows and activations of the layer on the fullest rank.
        fits: Whether that, with the homes, stays within the device's memory, as far as it is known.
    """

    strategy: str
    config: LaerConfig
    seconds: float
    compute: float
    tokens: float
    weights: float
    hidden: float
    peak_bytes: float
    fits: bool = True

    @property
    def shown(self) -> str:
        """The strategy, and where experts live if there is a choice."""
        choice = self.strategy not in FIXED_HOMES and self.config.homes is not None
        return f"{self.strategy} ({self.config.homes} experts)" if choice else self.strategy


@dataclass(frozen=True)
class Choice:
    """How a layer runs.

    Args:
        strategy: One of ``STRATEGIES``, or ``FSDP2``.
        config: The layer's settings; ``None`` where it is left to FSDP2.
        reason: Why, in a few words: ``given``, or milliseconds predicted, and those of what it was weighed against.
    """

    strategy: str
    config: LaerConfig | None
    reason: str


def alternatives(
    sizes: LayerSizes,
    profile: Profile,
    ranks: int,
    ranks_per_node: int,
    config: LaerConfig,
    *,
    tokens: int | None = None,
    loads: Sequence[Loads] = (),
    layers: int = 1,
    strategies: Sequence[str] = STRATEGIES,
    alone: bool = False,
) -> list[Alternative]:
    """Every strategy's prediction, in the order of ``strategies``, of which ``FSDP2`` can be one.

    Args:
        sizes: The layer.
        profile: The machine.
        ranks: N, that shard the experts.
        ranks_per_node: Ranks that share a node.
        config: Settings that all have in common.
        tokens: Tokens per rank and micro-batch; ``None`` means ``config.tokens_per_rank``, or 8192.
        loads: What to predict for; none means :func:`usual_loads`.
        layers: MoE layers of the model, whose homes fill memory.
        strategies: Those to try.
        alone: Nothing but this layer runs, as in ``hf-laer bench layer``: no weights travel ahead.
    """
    tokens = tokens or config.tokens_per_rank or USUAL_TOKENS
    loads = list(loads) or usual_loads(sizes, ranks, tokens)
    cost = sizes.cost(profile.of_ranks(ranks, ranks_per_node), tokens, config.max_rows_per_rank)
    # Processes on CPUs send with the cores that compute: nothing hides anything.
    alone = alone or profile.device == "cpu"
    made = []
    for strategy in strategies:
        ways = []
        for own in [config] if strategy == FSDP2 else _ways(config.with_strategy(strategy)):
            found = [fsdp2(one.now, cost, alone) if strategy == FSDP2 else _predicted(own, one, cost) for one in loads]
            ways.append(_alternative(strategy, own, found, sizes, profile, ranks, layers, alone))
        made.append(best(ways, ranks))
    return made


def _ways(config: LaerConfig) -> list[LaerConfig]:
    """The settings with each place where experts may live, whole ones first."""
    if config.homes is not None:
        return [config]
    # A group of ranks would hold experts that others own.
    homes = HOMES if config.group_size is None else ("sharded",)
    return [replace(config, expert_homes=one) for one in homes]


def settled(config: LaerConfig) -> LaerConfig:
    """The settings of a layer that is not sharded: one rank runs it, and ``auto`` is as good as ``ep``."""
    return config.with_strategy("ep") if config.strategy == AUTO else _ways(config)[0]


def choose(
    config: LaerConfig,
    layers: Mapping[str, LayerSizes],
    profile: Profile,
    ranks: int,
    ranks_per_node: int,
    expected_tokens: int | None = None,
    log: bool = True,
    leave: Collection[str] = (),
) -> dict[str, Choice]:
    """How each layer runs, where the config says ``auto``; layers of one size that may be left run alike.

    Args:
        config: As the user gave it.
        layers: The model's MoE layers.
        profile: The machine.
        ranks: N, that shard the experts.
        ranks_per_node: Ranks that share a node.
        expected_tokens: Tokens per rank and micro-batch, where the config does not say.
        log: Say what was chosen, and why.
        leave: Layers that may be left to FSDP2.
    """
    tokens = config.tokens_per_rank or expected_tokens
    kinds = {name: (sizes, name in leave) for name, sizes in layers.items()}
    chosen: dict[tuple[LayerSizes, bool], Choice] = {}
    tried = STRATEGIES if config.strategy == AUTO else (config.strategy,)
    for sizes, free in dict.fromkeys(kinds.values()):
        strategies = (*tried, FSDP2) if free and ranks > 1 and config.strategy == AUTO else tried
        found = alternatives(
            sizes, profile, ranks, ranks_per_node, config, tokens=tokens, layers=len(layers), strategies=strategies
        )
        one = best(found, ranks)
        own = None if one.strategy == FSDP2 else one.config
        chosen[sizes, free] = Choice(one.strategy, own, _reason(one, found, ranks))
        if log:
            _log(sizes, list(kinds.values()).count((sizes, free)), found, one, profile)
    return {name: chosen[kind] for name, kind in kinds.items()}


def _reason(chosen: Alternative, found: Sequence[Alternative], ranks: int) -> str:
    if len(found) == 1:
        return "given"
    if ranks == 1:
        return "one rank"
    others = [one for one in found if one is not chosen]
    # Plain FSDP2 is what is asked about first.
    other = min(others, key=lambda one: (one.strategy != FSDP2, one.seconds))
    large = "" if other.fits else ", too large"
    ours, theirs = (f"{ms:.3g}" if ms < 100 else f"{ms:.0f}" for ms in (1e3 * one.seconds for one in (chosen, other)))
    return f"{ours} ms, {other.strategy} {theirs}{large}"


def _log(sizes: LayerSizes, count: int, found: list[Alternative], chosen: Alternative, profile: Profile) -> None:
    others = ", ".join(
        f"{one.strategy} {1e3 * one.seconds:.2f}{'' if one.fits else ' (too large)'}"
        for one in found
        if one.strategy != chosen.strategy
    )
    logger.info(
        "%d MoE layers of %d experts (%d x %d, top-%d) run as %s, predicted to take %.2f ms each and micro-batch "
        "(compute %.2f, tokens %.2f, weights %.2f; others: %s), by %s figures of %s",
        *(count, sizes.experts, sizes.hidden, sizes.intermediate, sizes.top_k, chosen.shown),
        *(1e3 * value for value in (chosen.seconds, chosen.compute, chosen.tokens, chosen.weights)),
        *(others, "the shipped" if profile.assumed and "flops" in profile.assumed else "measured", profile.device),
    )


def best(found: Sequence[Alternative], ranks: int) -> Alternative:
    """The fastest that fits into memory; of those as good as equal, the first in ``PREFERENCE``.

    ``FSDP2`` comes before all where it is within ``WORTH`` of the fastest: there is nothing worth a risk to win.
    Where none fits, the fastest of those that need about the least. On one rank nothing can be balanced, and ``ep``
    does the least.
    """
    if ranks == 1:
        return next((one for one in found if one.strategy == "ep"), found[0])
    smallest = min(one.peak_bytes for one in found)
    able = [one for one in found if one.fits] or [one for one in found if one.peak_bytes <= ABOUT * smallest]
    least = min(one.seconds for one in able)
    left = [one for one in able if one.strategy == FSDP2 and one.seconds <= least * WORTH]
    if left:
        return left[0]
    close = [one for one in able if one.seconds <= least * ALIKE]
    return min(close, key=lambda one: PREFERENCE.index(one.strategy))


def tuned(config: LaerConfig, predicted: Callable[[LaerConfig], Alternative], slots: Sequence[int]) -> LaerConfig:
    """Slots, alpha and m with the least predicted time, one after the other; a setting is left where nothing is won.

    Args:
        config: The strategy and where to start.
        predicted: Asked for each candidate.
        slots: Slots per rank to try; each is room enough.
    """
    tried: dict[str, Sequence[Any]] = {}
    if config.strategy in ("llep", "fsep+llep"):
        tried = {"min_tokens_per_gemm": (1024, 256, 512, 2048, 4096, 8192), "capacity_factor": (1.0, 1.1, 1.25)}
    if config.strategy in ("fsep", "fsep+llep"):
        tried = {"slots_per_rank": slots, **tried}
    for name, values in tried.items():
        options = [config, *(replace(config, **{name: value}) for value in values)]
        seconds = [predicted(option).seconds for option in options]
        at = int(np.argmin(seconds))
        config = options[at] if seconds[at] < seconds[0] / ALIKE else config
    return config


def threshold(
    sizes: LayerSizes, profile: Profile, ranks: int, ranks_per_node: int, config: LaerConfig, tokens: int
) -> float | None:
    """LLEP's lambda in figures: the least max/mean over ranks from which on spilling is predicted to pay.

    One rank's experts take more and more of the tokens, evenly; ``None`` where not even thrice the mean pays.
    """
    share = -(-sizes.experts // ranks)
    spilling = replace(config.with_strategy("llep"), imbalance_threshold=None)
    cost = sizes.cost(profile.of_ranks(ranks, ranks_per_node), tokens, config.max_rows_per_rank)
    for percent in range(105, min(300, 100 * ranks) + 1, 5):
        loads = hot_loads(sizes, ranks, tokens, percent, share, of=100 * ranks)
        plan, _, _ = _planned(spilling, loads.now, loads.expected, cost)
        if plan.spilled:
            return percent / 100
    return None


def attention_seconds(machine: Topology, hidden: int, tokens: float) -> float:
    """Forward time of plain attention on one rank: four H x H projections, and one sequence's products."""
    flops = 8.0 * hidden * hidden * tokens + 2.0 * hidden * tokens * tokens
    return flops / (machine.flops * max(machine.gemm_efficiency))


def _predicted(config: LaerConfig, loads: Loads, cost: CostModel) -> Prediction:
    """What one micro-batch is predicted to cost."""
    now = loads.now
    ranks, size = len(now), 1 if config.strategy == "fsdp" else config.group_size or len(now)
    if config.strategy == "fsdp":
        plan, home, foreseen = fsdp(now), "sharded", None
    elif size < ranks:
        machine = replace(cost.topology, num_ranks=size, ranks_per_node=min(cost.topology.width, size))
        one = partial(_planned, config, cost=replace(cost, topology=machine))
        parts = [slice(at, at + size) for at in range(0, ranks, size)]
        done = [one(now[part], loads.expected[part]) for part in parts]
        plan, home = join_groups([each[0] for each in done], now), "sharded"
        known = [each[2] for each in done]
        foreseen = stack_groups([each for each in known if each is not None]) if None not in known else None
    else:
        plan, home, foreseen = _planned(config, now, loads.expected, cost)
    owners = chunk_owners(now.shape[1], ranks)
    found = predict(plan, now, cost, home=home, owners=owners, foreseen=foreseen).predicted
    assert found is not None
    return found


def _planned(
    config: LaerConfig, now: np.ndarray, expected: np.ndarray, cost: CostModel
) -> tuple[Plan, str, Placement | None]:
    """A plan, where weights live, and the slots that were known ahead, as the engine would have them."""
    ranks, experts = now.shape
    owners, width = chunk_owners(experts, ranks), cost.topology.width
    if config.strategy == "ep":
        return ep(now, owners), "whole", None
    spill: dict[str, Any] = {
        "capacity_factor": config.capacity_factor,
        "min_tokens_per_gemm": config.min_tokens_per_gemm,
    }
    if config.strategy == "llep":
        limit = config.imbalance_threshold
        told = {"imbalance_threshold": limit or 1.0, "ranks_per_node": width, **spill}
        if limit:
            return llep(now, owners, **told), "whole", None
        plans = spilling_plans(now, owners, **told)
        return cheapest(plans, now, cost, home="whole", owners=owners), "whole", None
    slots = config.slots_for(experts, ranks)
    asked = None if config.imbalance_threshold else cost
    if config.homes == "whole":
        limit = config.imbalance_threshold
        told = {"imbalance_threshold": limit, "cost": asked, "ahead": config.prefetch, **spill}
        placement = replica_placement(expected.sum(axis=0), owners, ranks, slots, width, **told)
        told = {"imbalance_threshold": limit or 1.0, "ranks_per_node": width, "cost": asked, **spill}
        plan = llep_ahead(now, owners, placement, **told)
        return plan, "whole", used(placement, plan)
    placement = fsep_placement(expected.sum(axis=0), ranks, slots, width)
    if config.strategy == "fsep":
        return fsep(now, placement, width), "sharded", placement
    return fsep_llep(now, placement, width, cost=asked, **spill), "sharded", placement


def home_bytes(sizes: LayerSizes, layers: int) -> int:
    """Of all experts, over all ranks: weights, gradients and two moments in float32; of frozen ones weights alone."""
    each = sizes.value_bytes if sizes.reduce_bytes == 0 else HOME_BYTES
    return each * (3 if sizes.gated else 2) * sizes.hidden * sizes.intermediate * sizes.experts * layers


def unsharded_bytes(sizes: LayerSizes, config: LaerConfig, ranks: int) -> int:
    """Of the experts that a rank holds in compute dtype between a layer's forward and its backward."""
    held = sizes.experts if config.strategy == "fsdp" else -(-sizes.experts // ranks)
    if config.strategy in ("fsep", UNION):
        held = config.slots_for(sizes.experts, config.group_size or ranks)
    return (3 if sizes.gated else 2) * sizes.hidden * sizes.intermediate * sizes.value_bytes * held


def ranks_that_hold(sizes: LayerSizes, profile: Profile, layers: int) -> int:
    """Ranks whose memory the homes of all experts take, with nothing else in it but what ``ROOM`` leaves."""
    return math.ceil(home_bytes(sizes, layers) / (ROOM * profile.memory_bytes))


def _alternative(
    strategy: str,
    config: LaerConfig,
    found: list[Prediction],
    sizes: LayerSizes,
    profile: Profile,
    ranks: int,
    layers: int,
    alone: bool,
) -> Alternative:
    # Where experts live whole, the host does what it does for llep.
    host = profile.host("llep" if config.homes == "whole" and strategy == UNION else strategy)
    host *= _host_factor(strategy, sizes)
    ahead = config.prefetch and not alone
    parts = [
        (one.compute_seconds, one.exchange_seconds, one.weights_exposed_seconds, one.weights_hidden_seconds)
        if ahead
        else (
            one.compute_seconds,
            one.exchange_seconds,
            one.weights_exposed_seconds + one.weights_hidden_seconds,
            0.0,
        )
        for one in found
    ]
    compute, tokens, weights, hidden = (sum(values) / len(found) for values in zip(*parts, strict=True))
    seconds = sum(max(host, sum(part[:3])) for part in parts) / len(found)
    peak = max(float(one.peak_bytes.max()) for one in found)
    home = home_bytes(sizes, layers) / ranks
    if config.reshard_after_forward is False:
        home += unsharded_bytes(sizes, config, ranks) * (layers - 1)
    fits = profile.memory_bytes == 0 or home + peak <= ROOM * profile.memory_bytes
    return Alternative(strategy, config, seconds, compute, tokens, weights, hidden, peak, fits)


def _host_factor(strategy: str, sizes: LayerSizes) -> float:
    """What multiplies the host's measured time of a layer, which is grouped and not recomputed."""
    if strategy == FSDP2:
        return (sizes.experts if sizes.looped else 1) * (1.0 if sizes.recompute == "none" else 1 + FORWARD)
    return 1 + FORWARD if sizes.recompute == "layer" else 1.0
