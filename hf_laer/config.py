"""The one configuration of hf_laer: a frozen, validated dataclass that round-trips through YAML and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

STRATEGIES = ("ep", "llep", "fsep", "fsep+llep", "fsdp")
AUTO = "auto"
# What `auto` knows beside them: the layer stays as it was, FSDP2 shards its experts and Transformers runs them.
FSDP2 = "fsdp2"
# Where expert parameters live: whole with an owner, or each one sharded over all ranks. Strategies that know but one.
HOMES = ("whole", "sharded")
UNION = "fsep+llep"
FIXED_HOMES = {"ep": "whole", "llep": "whole", "fsep": "sharded", "fsdp": "sharded"}
FORECASTS = ("auto", "last", "mean", "ema", "trend")
DTYPES = ("float32", "bfloat16", "float16")
RECOMPUTE = ("layer", "experts")
LARGEST = 2**31 - 1
LARGEST_FILE = 2**20


@dataclass(frozen=True)
class LaerConfig:
    """How the MoE layers of a patched model run.

    Args:
        strategy: Where experts live and how tokens meet them.
            ``ep`` keeps whole experts with an owner; ``llep`` also spills what exceeds an owner's capacity to the
            least loaded ranks (LLEP, arXiv 2601.17111); ``fsep`` shards every expert over all ranks and re-lays
            them out each step (LAER-MoE, arXiv 2602.11686); ``fsep+llep`` re-lays them out by forecast loads, splits
            the tokens exactly by the present ones, and spills what that leaves; ``fsdp`` unshards every expert on
            every rank. ``auto``, the default, takes for each layer the one that is predicted to be fastest
            (:mod:`hf_laer.choice`); where plain FSDP2 is, and shards the model, the layer is left as it was.
        expert_homes: Where the experts of ``fsep+llep`` live. ``whole``: with an owner, which uses its own where they
            live; forecast replicas of them travel ahead, as few as are worth it. ``sharded``: every expert over all
            ranks, which all unshard what they use. ``None`` takes for each layer the one that is predicted to be
            faster. Of the other strategies each has but one: ``ep`` and ``llep`` whole, ``fsep`` and ``fsdp`` sharded.
        profile: File of ``hf-laer tune`` that says what this machine can do; ``None`` means the figures shipped for
            its GPU. ``auto`` chooses by it, and spilling is weighed by it.
        tokens_per_rank: Tokens per rank and micro-batch that ``auto`` chooses for; ``None`` means what the trainer's
            arguments say, or 8192.
        capacity_factor: LLEP's alpha: an owner's capacity as a multiple of the mean load (>= 1).
        min_tokens_per_gemm: LLEP's m: fewer tokens than this are not worth a weight transfer (>= 1).
        imbalance_threshold: LLEP's lambda: spilling is off while max/mean load over ranks is below it (>= 1), and on
            above. ``None`` decides layer by layer and batch by batch: what is spilled must be predicted to save more
            time than the experts' way there costs; and whether it goes to the least loaded ranks or to those that the
            tokens come from.
        slots_per_rank: FSEP's room for unsharded experts on each rank; ``None`` means a quarter more than an even
            share of the experts, and at least one more.
        relayout_interval: FSEP makes a new placement every so many training micro-batches (>= 1).
        history: FSEP forecasts from the loads of so many of the latest training micro-batches (>= 1).
        forecast: How: ``last`` repeats the latest, ``mean`` and ``ema`` average, ``trend`` goes on along a line;
            ``auto`` takes for each layer the one that has missed by least so far.
        group_size: Tokens stay inside groups of so many consecutive ranks, each group holding a replica of every
            expert; ``None`` means all ranks.
        ranks_per_node: Ranks that share a node; ``None`` takes it from the launcher (``LOCAL_WORLD_SIZE``).
        compute_dtype: Dtype of the expert GEMMs and of unsharded weights; ``None`` follows FSDP's mixed-precision
            policy, or the parameters.
        reduce_dtype: Dtype in which weight gradients travel; ``None`` follows FSDP's policy, or the parameters.
            Accumulation is always float32.
        max_rows_per_rank: A rank forms the experts' products for at most so many rows (one per token and expert) at a
            time, which bounds the memory of their activations; backward forms them again. ``None`` means all at once.
        prefetch: Experts whose need is known ahead travel while the layer before computes, which holds one more layer's
            unsharded experts in memory. So do FSDP's parameters of the next decoder layer in forward, as by default,
            but asked for before the host waits for this layer's loads.
        reshard_after_forward: ``False`` keeps what a layer's forward unsharded until its backward: experts travel, and
            are converted, once in a step and not twice, and each layer has slots of its own. ``None`` follows FSDP's
            setting of that name, or is ``True``.
        peer_memory: Ranks of one host write tokens into each other's memory (up to 8 ranks, all of which share the
            experts), and fetch experts that are cut over all of them (``fsep``, ``fsep+llep``, ``fsdp``) from it by
            copy engines, where few and large enough. It costs each rank the memory of its part of one layer, and of two
            rows for each token of all ranks. ``None`` means where GPUs reach each other; ``False`` sends messages
            always; ``True`` also on CPUs.
        recompute: Under activation checkpointing, ``layer`` repeats dispatch, experts and combine; ``experts``
            keeps the dispatched rows and the output, so that the replay issues no collective.
        check_collectives: For finding out why ranks hang or part: before each collective all its ranks compare, by
            the process group's store, which one it is, for which layer and micro-batch, its sizes, and a hash of each
            plan; where they differ, or one does not come within the group's time limit, an error says who, where and
            what. Slow: the host waits for all ranks each time.

    Raises:
        ValueError: A setting is impossible; the message names it and the remedy.
    """

    strategy: str = "auto"
    expert_homes: str | None = None
    profile: str | None = None
    tokens_per_rank: int | None = None
    capacity_factor: float = 1.0
    min_tokens_per_gemm: int = 1024
    imbalance_threshold: float | None = None
    slots_per_rank: int | None = None
    relayout_interval: int = 1
    history: int = 8
    forecast: str = "auto"
    group_size: int | None = None
    ranks_per_node: int | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    max_rows_per_rank: int | None = None
    prefetch: bool = True
    reshard_after_forward: bool | None = None
    peer_memory: bool | None = None
    recompute: str = "layer"
    check_collectives: bool = False

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, (*STRATEGIES, AUTO))
        self._check_homes()
        if self.profile is not None and not (isinstance(self.profile, str) and self.profile):
            raise ValueError(f"profile={_shown(self.profile)} must be the path of a file, or null")
        _one_of("recompute", self.recompute, RECOMPUTE)
        _one_of("forecast", self.forecast, FORECASTS)
        _flag("prefetch", self.prefetch)
        for name in ("peer_memory", "reshard_after_forward"):
            if getattr(self, name) is not None:
                _flag(name, getattr(self, name))
        _at_least("capacity_factor", self.capacity_factor, 1.0)
        if self.imbalance_threshold is not None:
            _at_least("imbalance_threshold", self.imbalance_threshold, 1.0)
        for name in ("min_tokens_per_gemm", "relayout_interval", "history"):
            _whole(name, getattr(self, name))
        for name in ("slots_per_rank", "group_size", "ranks_per_node", "max_rows_per_rank", "tokens_per_rank"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if not isinstance(self.check_collectives, bool):
            raise ValueError(f"check_collectives={self.check_collectives!r} must be true or false")
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) is not None:
                _one_of(name, getattr(self, name), DTYPES)

    def _check_homes(self) -> None:
        if self.expert_homes is None:
            return
        _one_of("expert_homes", self.expert_homes, HOMES)
        fixed = FIXED_HOMES.get(self.strategy, self.expert_homes)
        if self.expert_homes != fixed:
            raise ValueError(
                f"expert_homes={self.expert_homes!r} does not go with strategy={self.strategy!r}, whose experts are "
                f"{fixed}: leave expert_homes out, or take {UNION}"
            )
        if self.expert_homes == "whole" and self.strategy == UNION and self.group_size is not None:
            raise ValueError(
                f"expert_homes='whole' does not go with group_size={self.group_size}: a group holds experts that "
                "others own; leave group_size out, or take expert_homes='sharded'"
            )

    @property
    def homes(self) -> str | None:
        """Where the experts live, ``whole`` or ``sharded``, as far as it is settled."""
        return FIXED_HOMES.get(self.strategy, None if self.strategy == AUTO else self.expert_homes)

    def with_strategy(self, strategy: str) -> LaerConfig:
        """The same with another strategy; where experts live is kept for the one that has a choice."""
        kept = self.expert_homes if strategy in (UNION, AUTO) else None
        return dataclasses.replace(self, strategy=strategy, expert_homes=kept)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LaerConfig:
        """Builds a config from a mapping; an unknown key is a ``ValueError`` that lists the known ones."""
        if not isinstance(values, dict):
            raise ValueError(f"LaerConfig needs a mapping of settings, got {type(values).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise ValueError(f"LaerConfig has no setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        nested = [name for name, value in values.items() if isinstance(value, list | tuple | dict | set)]
        if nested:  # never shown: what a few aliases in YAML stand for may be longer than memory
            raise ValueError(f"LaerConfig takes one value for {', '.join(nested)}, not several")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> LaerConfig:
        """Reads a ``.yaml``, ``.yml`` or ``.json`` file; none of them ever runs code.

        Raises:
            ValueError: The file is none, or a setting in it is impossible; names both.
            OSError: The file cannot be opened.
        """
        data = Path(path).read_bytes()
        try:
            if len(data) > LARGEST_FILE:
                raise ValueError(f"{len(data)} bytes are too many")
            text = data.decode("utf-8")
            values = json.loads(text) if Path(path).suffix == ".json" else yaml.safe_load(text)
        except Exception as error:  # PyYAML's constructors raise whatever bad scalars make them raise
            raise ValueError(f"{path} is not a readable LaerConfig file: {error or type(error).__name__}") from error
        try:
            return cls.from_dict({} if values is None else values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain Python values."""
        return dataclasses.asdict(self)

    def to_file(self, path: str | Path) -> None:
        """Writes YAML or JSON by the file's suffix, aside first, then renamed."""
        path = Path(path)
        values = self.to_dict()
        text = json.dumps(values, indent=2) if path.suffix == ".json" else yaml.safe_dump(values, sort_keys=False)
        aside = path.with_name(path.name + ".tmp")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)

    def slots_for(self, num_experts: int, ranks: int) -> int:
        """Slots per rank of an FSEP placement of ``num_experts`` on ``ranks`` ranks of one group.

        Raises:
            ValueError: ``slots_per_rank`` is too small to hold every expert once.
        """
        share = math.ceil(num_experts / ranks)
        wanted = self.slots_per_rank
        if wanted is None:
            wanted = max(share + 1, math.ceil(1.25 * num_experts / ranks))
        if wanted < share:
            raise ValueError(
                f"slots_per_rank={wanted} on {ranks} ranks holds {wanted * ranks} experts, the model has "
                f"{num_experts}: set slots_per_rank to {share} or more"
            )
        return min(wanted, num_experts)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={_shown(value)} is not one of {', '.join(allowed)}")


def _at_least(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LARGEST:
        raise ValueError(f"{name}={_shown(value)} must be a finite number of at least {least}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={_shown(value)} must be a whole number of at least 1, and below 2**31")


def _shown(value: object) -> str:
    """The value for a message; numbers and strings may have any length."""
    return repr(value if not isinstance(value, int) or abs(value) < 10**40 else float("inf"))[:80]
