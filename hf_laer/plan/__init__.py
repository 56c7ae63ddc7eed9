"""Planners: pure functions from loads to plans. Numpy in, frozen dataclasses out; no torch."""

from .at_home import llep_at_home, spilling_plans
from .cost import CostModel, balanced_ideal, lower_bound, predict
from .eplb import eplb, eplb_placement, lplb
from .fixed import ep, fsdp, fsdp_ep
from .groups import join_groups, stack_groups
from .guard import cheapest, no_worse_than_ep
from .laer import fsep_placement, initial_placement, laer_placement
from .llep import llep
from .own import OwnPart, gained, holders, own_part
from .owners import chunk_owners, owner_loads
from .registry import PLANNERS, get_planner, planner_summary
from .relocate import flexmoe, flexmoe_placement, smartmoe, smartmoe_owners
from .replicas import begins_with_owned, llep_ahead, replica_placement, used
from .shadow import fastermoe, prophet, prophet_placement
from .shares import even_split, laer
from .spill import fsep_llep
from .split import exact_split, fsep
from .topology import PROFILES, Topology, read_topology, topology
from .traffic import Traffic, traffic
from .types import EMPTY, Placement, Plan, Prediction, Split, imbalance
from .warmup import compile_kernels

__all__ = [
    "EMPTY",
    "PLANNERS",
    "PROFILES",
    "CostModel",
    "OwnPart",
    "Placement",
    "Plan",
    "Prediction",
    "Split",
    "Topology",
    "Traffic",
    "balanced_ideal",
    "begins_with_owned",
    "cheapest",
    "chunk_owners",
    "compile_kernels",
    "ep",
    "eplb",
    "eplb_placement",
    "even_split",
    "exact_split",
    "fastermoe",
    "flexmoe",
    "flexmoe_placement",
    "fsdp",
    "fsdp_ep",
    "fsep",
    "fsep_llep",
    "fsep_placement",
    "gained",
    "get_planner",
    "holders",
    "imbalance",
    "initial_placement",
    "join_groups",
    "laer",
    "laer_placement",
    "llep",
    "llep_ahead",
    "llep_at_home",
    "lower_bound",
    "lplb",
    "no_worse_than_ep",
    "own_part",
    "owner_loads",
    "planner_summary",
    "predict",
    "prophet",
    "prophet_placement",
    "read_topology",
    "replica_placement",
    "smartmoe",
    "smartmoe_owners",
    "spilling_plans",
    "stack_groups",
    "topology",
    "traffic",
    "used",
]
