"""Compiles the planners ahead of training: one rank of each node first, so that the others find the cache."""

from __future__ import annotations

import numpy as np

from .addresses import copy_rows, sum_rows
from .at_home import llep_at_home
from .cost import CostModel, predict
from .fixed import fsdp
from .forecast import Forecaster
from .guard import cheapest
from .laer import fsep_placement, initial_placement, laer_placement
from .llep import llep
from .own import gained, holders, own_part
from .owners import chunk_owners
from .replicas import begins_with_owned, llep_ahead, replica_placement
from .spill import fsep_llep
from .split import fsep
from .topology import Topology
from .types import is_level


def compile_kernels() -> None:
    """Compiles every kernel behind the engine's planners, or loads it from the cache."""
    loads = np.array([[9, 1, 0], [9, 1, 0]], np.int64)
    cost = CostModel(Topology(2, 2), 1, 1, 1)
    owners = chunk_owners(3, 2)
    plan = llep(loads, owners, min_tokens_per_gemm=1, imbalance_threshold=1.0, cost=cost)
    llep_at_home(loads, owners, min_tokens_per_gemm=1)
    own_part(plan, loads, 0)
    copy_rows(np.ones((1, 6), np.int64), owners[:1], owners[:1], 2, 4, 1)
    sum_rows(np.ones(4, np.int64), np.zeros((0, 4), np.int64), owners[:0], owners[:0], owners, 1, True)
    seen = Forecaster(1)
    seen.observe(loads)
    seen.observe(loads)
    held = holders(plan.placement.slots, 3)
    gained(held, held)
    fsep(loads, laer_placement(loads, 2, 2))
    fsep(loads, fsep_placement(loads, 2, 2), ranks_per_node=1)
    fsep(loads, initial_placement(3, 2, 2))
    fsep_llep(loads, initial_placement(3, 2, 2), ranks_per_node=1, min_tokens_per_gemm=1)
    fsep_placement(loads.sum(0), 2, 2)
    placement = replica_placement(loads.sum(0), owners, 2, 3, min_tokens_per_gemm=1)
    begins_with_owned(placement, owners)
    llep_ahead(loads, owners, placement, min_tokens_per_gemm=1, cost=cost)
    plain = predict(fsdp(loads), loads, cost, home="sharded")
    cheapest((plain, plan), loads, cost, home="whole", owners=owners)
    is_level([plan])
