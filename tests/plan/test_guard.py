"""Plans made on the very loads that they serve are never predicted slower than ep; hypothesis searches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import (
    EMPTY,
    CostModel,
    chunk_owners,
    ep,
    fastermoe,
    fsep,
    fsep_llep,
    fsep_placement,
    llep,
    llep_ahead,
    no_worse_than_ep,
    predict,
    prophet,
    prophet_placement,
    replica_placement,
    topology,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_never_worse_than_ep(data):
    nodes, width = data.draw(st.sampled_from([(1, 4), (2, 2), (2, 4)]))
    ranks, experts = nodes * width, data.draw(st.sampled_from([4, 9, 16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scale = data.draw(st.sampled_from([1, 30, 3000]))
    loads = rng.integers(0, scale + 1, (ranks, experts)) * rng.integers(0, 6, experts)
    owners = chunk_owners(experts, ranks)
    cost = CostModel(topology("h200", nodes, width), *data.draw(st.sampled_from([(64, 64), (2048, 768)])), 2)
    placement = fsep_placement(loads, ranks, -(-experts // ranks) + 1, width)
    worth = cost.transfer_tokens()
    spill = {"min_tokens_per_gemm": data.draw(st.sampled_from([1, worth])), "imbalance_threshold": 1.0}
    made = [
        (llep(loads, owners, **spill), "whole", None),
        (fastermoe(loads, owners, transfer_tokens=worth), "shadowed", None),
        (prophet(loads, prophet_placement(loads, owners, transfer_tokens=worth), owners), "whole", None),
        (fsep(loads, placement, width), "sharded", placement),
        (fsep_llep(loads, placement, width, min_tokens_per_gemm=worth), "sharded", placement),
    ]
    for plan, home, foreseen in made:
        plain = predict(ep(loads, owners), loads, cost, home=home, owners=owners).predicted
        got = no_worse_than_ep(plan, loads, owners, cost, home=home, foreseen=foreseen).predicted
        assert got.seconds <= plain.seconds
    guarded = llep(loads, owners, cost=cost, **spill)
    whole = predict(ep(loads, owners), loads, cost, home="whole", owners=owners).predicted
    assert guarded.predicted.seconds <= whole.seconds


def test_spilling_is_refused_where_batches_are_small():
    loads = np.full((8, 32), 8)
    loads[:, 0] = 40
    owners = chunk_owners(32, 8)
    cost = CostModel(topology("h200", 1, 8), 2880, 2880, 4)
    spill = {"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0}
    assert llep(loads, owners, **spill).spilled > 0
    assert llep(loads, owners, cost=cost, **spill).spilled == 0
    assert llep(loads * 1000, owners, cost=cost, **spill).spilled > 0


def test_the_hosts_part_of_spilling_counts_once_however_little_is_spilled():
    loads = np.full((8, 32), 2000)
    loads[:, 0] = 9000
    owners, placement = chunk_owners(32, 8), fsep_placement(loads, 8, 5)
    free = topology("h200", 1, 8)
    slow = replace(free, spill_seconds=0.003)

    def seconds(plan, machine, home, foreseen=None, **settings):
        cost = CostModel(machine, 2880, 2880, 4, **settings)
        return predict(plan, loads, cost, home=home, owners=owners, foreseen=foreseen).predicted.seconds

    def longer(*args, **settings):
        return seconds(args[0], slow, *args[1:], **settings) - seconds(args[0], free, *args[1:], **settings)

    spilling = llep(loads, owners, imbalance_threshold=1.0)
    assert spilling.spilled > 0
    assert longer(spilling, "whole") == pytest.approx(0.003)
    assert longer(spilling, "whole", training=False) == pytest.approx(0.001)
    assert longer(ep(loads, owners), "whole") == 0
    assert longer(fsep(loads, placement), "sharded", placement) == 0
    # Replicas of experts that have an owner are packed and sent for like spilled ones, though they were foreseen.
    replicas = replica_placement(loads.sum(0), owners, 8, 5)
    known = llep_ahead(loads, owners, replicas)
    assert (known.placement.slots != EMPTY).sum() > 32
    assert longer(known, "whole", replicas) == pytest.approx(0.003)
    gain = seconds(ep(loads, owners), free, "whole") - seconds(spilling, free, "whole")
    for worth, kept in ((0.9, True), (1.1, False)):
        cost = CostModel(replace(free, spill_seconds=worth * gain), 2880, 2880, 4)
        assert (llep(loads, owners, imbalance_threshold=1.0, cost=cost).spilled > 0) is kept
