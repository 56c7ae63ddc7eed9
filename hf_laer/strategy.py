"""From a strategy's name to the plan of one micro-batch, for each token group."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_laer.config import LaerConfig
from hf_laer.plan import CostModel, cheapest, chunk_owners, ep, fsdp, fsep, fsep_llep, llep, llep_ahead, spilling_plans
from hf_laer.plan.types import Placement, Plan


def sharded_dim(config: LaerConfig) -> int:
    """The dimension of a parameter that is cut over the ranks: experts, or the rows of each.

    Raises:
        ValueError: Where experts live is not settled.
    """
    if config.homes is None:
        raise ValueError(f"strategy={config.strategy!r} has not been given expert_homes yet")
    return 0 if config.homes == "whole" else 1


def token_groups(config: LaerConfig, ranks: int) -> list[range]:
    """The ranks of each token group, consecutive.

    ``fsdp`` exchanges no tokens: each rank is a group of its own.

    Raises:
        ValueError: ``group_size`` does not divide the ranks.
    """
    size = 1 if config.strategy == "fsdp" else config.group_size or ranks
    if ranks % size:
        raise ValueError(
            f"group_size={size} does not divide the {ranks} ranks that shard the experts: choose a divisor"
        )
    return [range(start, start + size) for start in range(0, ranks, size)]


def relays(config: LaerConfig) -> bool:
    """Whether experts are laid out anew by a tuner."""
    return config.strategy in ("fsep", "fsep+llep")


def needs_loads(config: LaerConfig) -> bool:
    """Whether a plan depends on the loads of other ranks."""
    return config.strategy != "fsdp"


def make_plan(
    config: LaerConfig,
    loads: np.ndarray,
    placement: Placement | None,
    ranks_per_node: int,
    cost: CostModel | None = None,
) -> Plan:
    """The plan of one token group.

    Args:
        config: Strategy and its settings.
        loads: int64 ``[N, E]`` of the group's ranks.
        placement: The tuner's, where there is one.
        ranks_per_node: Ranks that share a node.
        cost: Layer and machine, by which spilling is weighed where the config has no ``imbalance_threshold``, to the
            least loaded ranks and to those that the tokens come from; without one, or with a threshold, everything
            above the capacity is spilled to the least loaded ranks, as published.
    """
    ranks, experts = loads.shape
    if config.strategy == "fsdp":
        return fsdp(loads)
    cost = cost if config.imbalance_threshold is None else None
    if placement is not None:
        if config.homes == "whole":
            return llep_ahead(
                loads,
                chunk_owners(experts, ranks),
                placement,
                capacity_factor=config.capacity_factor,
                min_tokens_per_gemm=config.min_tokens_per_gemm,
                imbalance_threshold=config.imbalance_threshold or 1.0,
                ranks_per_node=ranks_per_node,
                cost=cost,
            )
        if config.strategy == "fsep":
            return fsep(loads, placement, ranks_per_node=ranks_per_node)
        return fsep_llep(
            loads,
            placement,
            ranks_per_node=ranks_per_node,
            capacity_factor=config.capacity_factor,
            min_tokens_per_gemm=config.min_tokens_per_gemm,
            cost=cost,
        )
    owners = chunk_owners(experts, ranks)
    if config.strategy == "ep":
        return ep(loads, owners)
    spill: dict[str, Any] = {
        "capacity_factor": config.capacity_factor,
        "min_tokens_per_gemm": config.min_tokens_per_gemm,
        "imbalance_threshold": config.imbalance_threshold or 1.0,
        "ranks_per_node": ranks_per_node,
    }
    if cost is None:
        return llep(loads, owners, **spill)
    return cheapest(spilling_plans(loads, owners, **spill), loads, cost, home="whole", owners=owners)
