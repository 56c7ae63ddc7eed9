"""What a layer is predicted to cost that is left as it was: FSDP2 shards its experts, Transformers runs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_laer.plan import CostModel, Prediction, fsdp, predict

# Values of H, and of I, that Transformers' grouped experts read and write for a token and expert in each of the three
# passes that forward and backward count for. Written out it is 7 H + 5 I forward; but gathers of rows are undone in
# backward by sorted, accumulating scatters. Fitted to the rival `fsdp_gather` of `hf-laer bench layer`, which gathers
# once instead of twice, on two H200: four layers and batches (docs/benchmarks.md) lie within 4% of what is predicted.
COPIED = 12


def fsdp2(loads: np.ndarray, cost: CostModel, alone: bool) -> Prediction:
    """Forward and backward of one micro-batch.

    Every rank computes its own tokens with all experts. They are gathered for forward and for backward, under the
    compute of the layer before (FSDP2's prefetch), and their gradients scattered under the backward of the next.

    Args:
        loads: int64 ``[N, E]``.
        cost: Layer and machine.
        alone: Nothing runs before or after, under which weights could travel.
    """
    plan, memory = fsdp(loads), cost.topology.copy_bandwidth
    # On the links a trip is that of every expert to every rank; what is copied is counted below.
    bare = replace(cost, topology=replace(cost.topology, copy_bandwidth=0.0))
    found = predict(plan, loads, bare, home="sharded").predicted
    assert found is not None
    packing = 0.0
    compute = found.compute_seconds
    if memory > 0:
        values = COPIED * (cost.hidden + cost.intermediate) * cost.value_bytes
        compute += cost.computes * float(plan.rank_loads.max()) * values / memory
        # What was gathered is copied into parameters, gradients into what is scattered: no product hides it.
        packing = cost.weight_trips * 2.0 * loads.shape[1] * cost.expert_bytes / memory
    link = found.weights_exposed_seconds + found.weights_hidden_seconds
    hidden = 0.0 if alone else min(link, compute + 3 * cost.other_seconds)
    return replace(
        found,
        seconds=compute + link - hidden + packing,
        compute_seconds=compute,
        weights_exposed_seconds=link - hidden + packing,
        weights_hidden_seconds=hidden,
        peak_bytes=_peak(plan.rank_loads, cost, loads.shape[1]),
    )


def _peak(rows: np.ndarray, cost: CostModel, experts: int) -> np.ndarray:
    """float64 ``[N]``: all experts of this layer and of the next one, gradients of all, and the rows' activations."""
    per_token = (3 * cost.hidden + (5 if cost.gated else 2) * cost.intermediate) * cost.value_bytes
    return (2.0 if cost.is_frozen else 3.0) * experts * cost.expert_bytes + rows * float(per_token)
