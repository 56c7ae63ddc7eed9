"""What the SFT recipe can be told, beside TRL's own arguments; all of it from one YAML file or the command
line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
from upcycle import UpcycleConfig

from hf_laer import LaerConfig

UNPATCHED = "none"


@dataclass
class LaerArguments:
    """The settings of ``LaerConfig`` one by one, and ``strategy: none`` for the unpatched model.

    A setting left ``None`` has ``LaerConfig``'s own default.
    """

    strategy: str = field(
        default="auto",
        metadata={"help": "ep, llep, fsep, fsep+llep, fsdp or auto; none trains the unpatched model, to compare."},
    )
    expert_homes: str | None = field(
        default=None, metadata={"help": "Of fsep+llep: whole or sharded; none: the faster."}
    )
    profile: str | None = field(default=None, metadata={"help": "File of hf-laer tune."})
    tokens_per_rank: int | None = field(default=None, metadata={"help": "That auto chooses for."})
    capacity_factor: float | None = field(default=None, metadata={"help": "LLEP's alpha, at least 1."})
    min_tokens_per_gemm: int | None = field(default=None, metadata={"help": "LLEP's m, at least 1."})
    imbalance_threshold: float | None = field(
        default=None, metadata={"help": "LLEP's lambda, at least 1; none: by predicted gain."}
    )
    slots_per_rank: int | None = field(default=None, metadata={"help": "FSEP's room for unsharded experts."})
    relayout_interval: int | None = field(default=None, metadata={"help": "FSEP's micro-batches per layout."})
    history: int | None = field(default=None, metadata={"help": "FSEP's micro-batches to forecast from."})
    forecast: str | None = field(default=None, metadata={"help": "FSEP's: auto, last, mean, ema or trend."})
    group_size: int | None = field(default=None, metadata={"help": "Ranks among which tokens stay."})
    ranks_per_node: int | None = field(default=None, metadata={"help": "The launcher's, if not given."})
    compute_dtype: str | None = field(default=None, metadata={"help": "Of the experts' products."})
    reduce_dtype: str | None = field(default=None, metadata={"help": "In which weight gradients travel."})
    max_rows_per_rank: int | None = field(default=None, metadata={"help": "Bounds the activations' memory."})
    prefetch: bool | None = field(default=None, metadata={"help": "Experts travel ahead of their layer."})
    reshard_after_forward: bool | None = field(
        default=None, metadata={"help": "false: experts stay until their layer's backward; none: as FSDP is told."}
    )
    peer_memory: bool | None = field(
        default=None, metadata={"help": "Tokens and experts by peers' memory; none: where GPUs reach it."}
    )
    check_collectives: bool | None = field(default=None, metadata={"help": "Compares ranks before each collective."})
    recompute: str | None = field(default=None, metadata={"help": "layer or experts."})

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> LaerConfig | None:
        """The validated configuration; ``None`` for the unpatched model."""
        if self.strategy == UNPATCHED:
            return None
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return LaerConfig.from_dict({name: value for name, value in given.items() if value is not None})


@dataclass
class RecipeArguments:
    """What this recipe adds."""

    rows_per_domain: int = field(
        default=512, metadata={"help": "Chat pairs of each domain, where no --dataset_name is given."}
    )
    rows_per_block: int = field(
        default=0, metadata={"help": "So many chat pairs of one domain follow one another; 0 mixes them."}
    )
    dequantize: bool = field(
        default=False, metadata={"help": "Load an MXFP4 checkpoint (gpt-oss) in full precision, to train it."}
    )
    trace: str | None = field(
        default=None, metadata={"help": "Write a trace of the routing (.npz) there, for hf-laer simulate."}
    )
    require_moves: bool = field(
        default=False,
        metadata={
            "help": "Fail if planning moved nothing, as a demonstration must not; auto leaves no layer to FSDP2."
        },
    )


class Settings(NamedTuple):
    """All that was told."""

    script: ScriptArguments
    training: SFTConfig
    model: ModelConfig
    laer: LaerArguments
    upcycle: UpcycleConfig
    recipe: RecipeArguments


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Reads ``--config FILE`` and the command line, which wins; where there is no GPU, trains on the CPU."""
    told = list(sys.argv[1:] if arguments is None else arguments)
    kinds: list[Any] = [ScriptArguments, SFTConfig, ModelConfig]
    kinds += [LaerArguments, UpcycleConfig, RecipeArguments]
    # SFTConfig sets up devices and processes as it is made, so the options cannot wait until it is there.
    return Settings(*TrlParser(kinds).parse_args_and_config(told + cpu_options(told)))


def cpu_options(told: Sequence[str]) -> list[str]:
    """What must be added to ``told`` where there is no GPU.

    Without ``use_cpu`` each process would train alone, silently. float32 is the faster dtype on CPUs without
    bfloat16 units; ``--bf16 true`` on the command line asks for bfloat16 all the same.
    """
    if torch.cuda.is_available():
        return []
    options = ["--use_cpu", "true"]
    return options if "--bf16" in told else [*options, "--bf16", "false"]
