"""The cost model: its parts one by one, bounds, and that no plan for the present loads is dearer than ep."""

import numpy as np
import pytest

from hf_laer.plan import (
    EMPTY,
    CostModel,
    Placement,
    Plan,
    Split,
    Topology,
    balanced_ideal,
    chunk_owners,
    ep,
    fsdp,
    fsep,
    initial_placement,
    llep,
    lower_bound,
    predict,
    read_topology,
    topology,
    traffic,
)
from tests.plan.oracles import stays_home

MACHINE = topology("h200", 2, 4)
COST = CostModel(MACHINE, hidden=2048, intermediate=768, top_k=1)


def even(ranks=8, experts=16, tokens=1024):
    return np.full((ranks, experts), tokens)


def test_rows_with_one_choice_are_tokens():
    loads = np.random.default_rng(0).integers(0, 30, (8, 16))
    plan = ep(loads, chunk_owners(16, 8))
    rows = traffic(loads, plan.split, 4, 1)
    assert rows.stayed.sum() == pytest.approx(stays_home(plan, loads))
    assert rows.sent_near.sum() == pytest.approx(rows.received_near.sum())
    assert rows.sent_far.sum() == rows.foreign_nodes
    assert rows.received == pytest.approx(plan.rank_loads.astype(float))


def test_rows_are_fewer_than_choices_when_choices_share_a_rank():
    loads = even(2, 4, 100)
    rows = traffic(loads, ep(loads, chunk_owners(4, 2)).split, 2, 4)
    assert rows.received == pytest.approx(np.full(2, 200 * (1 - 0.5**4)))


def test_fsdp_sends_no_row_but_the_most_weights():
    loads = even()
    plan = predict(fsdp(loads), loads, COST, home="sharded")
    assert plan.predicted.exchange_seconds == 0
    assert plan.predicted.foreign_tokens == 0
    want = 16 * COST.expert_bytes * 7 / 8 * 3
    assert plan.predicted.bytes_in == pytest.approx(np.full(8, want))
    assert plan.predicted.bytes_out == pytest.approx(np.full(8, want))


def test_small_groups_are_slow():
    few, many = even(8, 128, 1), even(8, 8, 16)
    slow = predict(ep(few, chunk_owners(128, 8)), few, COST, home="whole", owners=chunk_owners(128, 8))
    fast = predict(ep(many, chunk_owners(8, 8)), many, COST, home="whole", owners=chunk_owners(8, 8))
    assert slow.predicted.compute_seconds > 4 * fast.predicted.compute_seconds


def test_the_node_link_is_shared_and_both_directions_count():
    loads = np.zeros((8, 8), np.int64)
    loads[:4, 7] = 1000  # four senders, one receiver on the other node
    out = predict(ep(loads, chunk_owners(8, 8)), loads, COST, home="whole", owners=chunk_owners(8, 8))
    back = loads[::-1].copy()
    seconds = 4000 * 2048 * 2 / MACHINE.inter_bandwidth + MACHINE.inter_latency
    assert out.predicted.exchange_seconds == pytest.approx(4 * seconds)
    other = predict(ep(back, chunk_owners(8, 8)), back, COST, home="whole", owners=chunk_owners(8, 8))
    assert other.predicted.exchange_seconds < out.predicted.exchange_seconds  # all near now


def test_ep_moves_no_weights_and_helpers_do():
    loads = even()
    loads[:, 0] *= 8
    owners = chunk_owners(16, 8)
    plain = predict(ep(loads, owners), loads, COST, home="whole", owners=owners)
    spilling = llep(loads, owners, min_tokens_per_gemm=1, imbalance_threshold=1.0)
    helped = predict(spilling, loads, COST, home="whole", owners=owners)
    assert plain.predicted.weights_exposed_seconds == plain.predicted.weights_hidden_seconds == 0
    assert helped.predicted.weights_exposed_seconds > 0
    foreseen = predict(spilling, loads, COST, home="whole", owners=owners, foreseen=spilling.placement).predicted
    assert foreseen.weights_exposed_seconds < helped.predicted.weights_exposed_seconds


def test_what_a_node_needs_twice_crosses_once():
    """Expert 0 of rank 0 at both helpers of the other node: over the border once, then from one to the other."""
    slots = np.full((4, 3), EMPTY)
    slots[:, :2] = np.arange(8).reshape(4, 2)
    slots[2:, 2] = 0
    loads = np.zeros((4, 8), np.int64)
    split = Split(np.arange(9), chunk_owners(8, 4), np.tile([0, 1], 4), np.zeros(8, np.int64))
    plan, machine = Plan(Placement(slots), split), topology("h200", 2, 2)
    cost = CostModel(machine, hidden=2048, intermediate=768, top_k=1, training=False)
    two = predict(plan, loads, cost, home="whole", owners=chunk_owners(8, 4)).predicted
    expert = cost.expert_bytes
    # A node of two has the links of two ranks to others.
    first = max(expert / machine.intra_bandwidth, expert / machine.inter_bandwidth) + machine.inter_latency
    assert two.weights_exposed_seconds == pytest.approx(
        first + expert / machine.intra_bandwidth + machine.intra_latency
    )
    assert two.bytes_in == pytest.approx([0, 0, expert, expert])
    assert two.bytes_out.sum() == pytest.approx(2 * expert)
    assert two.bytes_out[0] == expert
    # Slices: half of each expert lives on the other node; what both ranks need of it, each gets half of and passes on.
    sliced = predict(plan, loads, cost, home="sharded").predicted
    assert sliced.bytes_in == pytest.approx(np.array([2, 2, 3, 3]) * expert * 3 / 4)
    assert sliced.bytes_out.sum() == pytest.approx(sliced.bytes_in.sum())
    whole = sliced.weights_exposed_seconds + sliced.weights_hidden_seconds
    straight = max(
        (2 * 3 / 4 + 1 / 4 + 1 / 4) * expert / machine.intra_bandwidth, 2.5 * expert / machine.inter_bandwidth
    )
    assert whole == pytest.approx(
        straight + machine.inter_latency + expert / 4 / machine.intra_bandwidth + machine.intra_latency, rel=1e-3
    )


def test_prefetched_weights_hide_under_compute():
    loads = even(8, 16, 8192)
    plan = predict(fsep(loads, initial_placement(16, 8, 3, 4), 4), loads, COST, home="sharded")
    assert plan.predicted.weights_hidden_seconds > 0
    assert plan.predicted.seconds == pytest.approx(
        plan.predicted.compute_seconds + plan.predicted.exchange_seconds + plan.predicted.weights_exposed_seconds
    )


def test_resident_copies_sync_gradients_only_where_there_are_copies():
    loads = even(8, 8)
    single = predict(ep(loads, chunk_owners(8, 8)), loads, COST, home="resident")
    assert single.predicted.weights_exposed_seconds + single.predicted.weights_hidden_seconds == 0
    double = predict(fsep(loads, initial_placement(8, 8, 2)), loads, COST, home="resident")
    assert double.predicted.weights_exposed_seconds + double.predicted.weights_hidden_seconds > 0


def test_memory_bound_by_chunks():
    loads = even(8, 16, 8192)
    owners = chunk_owners(16, 8)
    whole = predict(ep(loads, owners), loads, COST, home="whole", owners=owners).predicted
    small = CostModel(MACHINE, hidden=2048, intermediate=768, top_k=1, max_rows_per_rank=1024)
    chunked = predict(ep(loads, owners), loads, small, home="whole", owners=owners).predicted
    assert chunked.peak_bytes.max() < whole.peak_bytes.max()


def test_bounds_and_ideal():
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 5000, (8, 16))
    owners = chunk_owners(16, 8)
    for plan, home in ((ep(loads, owners), "whole"), (fsdp(loads), "sharded")):
        got = predict(plan, loads, COST, home=home, owners=owners).predicted
        assert lower_bound(loads, COST).seconds <= got.seconds
    balanced = even()
    ideal = balanced_ideal(balanced, COST)
    real = predict(ep(balanced, owners), balanced, COST, home="whole", owners=owners).predicted
    assert ideal.seconds == pytest.approx(real.seconds)
    nothing = np.zeros((8, 16), np.int64)
    empty = predict(ep(nothing, owners), nothing, COST, home="whole", owners=owners).predicted
    assert empty.seconds == 0
    assert balanced_ideal(nothing, COST).seconds == lower_bound(nothing, COST).seconds == 0


def test_products_beyond_int32_stay_exact():
    """B53: 64 experts of 4096 x 14336 are 3,758,096,384 values per matrix."""
    cost = CostModel(MACHINE, hidden=4096, intermediate=14336, top_k=2)
    assert 64 * cost.expert_bytes == 3 * 2 * 3_758_096_384
    loads = np.full((8, 64), 3_000_000_000)
    plan = predict(ep(loads, chunk_owners(64, 8)), loads, cost, home="whole", owners=chunk_owners(64, 8))
    assert plan.predicted.seconds > 0
    assert plan.predicted.peak_bytes.min() > 2**31


def test_same_bits_every_time():
    loads = np.random.default_rng(0).integers(0, 99, (8, 16))
    owners = chunk_owners(16, 8)
    got = {predict(ep(loads, owners), loads, COST, home="whole", owners=owners).predicted.seconds for _ in "abc"}
    assert len(got) == 1


def test_unequal_nodes():
    machine = Topology(num_ranks=7, ranks_per_node=3)
    assert machine.nodes == 3
    loads = even(7, 14)
    plan = fsep(loads, initial_placement(14, 7, 3, 3), 3)
    cost = CostModel(machine, 64, 64, 2)
    assert predict(plan, loads, cost, home="sharded").predicted.seconds > 0


def test_a_measured_profile_replaces_the_default(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text('{"num_ranks": 4, "ranks_per_node": 4, "gemm_tokens": [64], "gemm_efficiency": [0.5]}')
    assert read_topology(path).gemm_efficiency == (0.5,)
    path.write_text('{"num_ranks": 4, "speed": 3}')
    with pytest.raises(ValueError, match="unknown fields speed"):
        read_topology(path)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Topology(0, 1), "num_ranks=0"),
        (lambda: Topology(4, 4, flops=-1.0), "flops=-1.0"),
        (lambda: Topology(4, 4, gemm_tokens=(8, 4), gemm_efficiency=(0.5, 0.5)), "ascend"),
        (lambda: Topology(4, 4, gemm_tokens=(8,), gemm_efficiency=(1.5,)), "1.5"),
        (lambda: topology("tpu", 1, 1), "h200"),
        (lambda: CostModel(MACHINE, 0, 1, 1), "hidden=0"),
        (lambda: CostModel(MACHINE, 1, 1, 1, recompute="all"), "recompute"),
        (lambda: predict(fsdp(even(4)), even(4), COST, home="sharded"), "4 ranks, the topology has 8"),
        (lambda: predict(fsdp(even()), even(), COST, home="moon"), "moon"),
        (lambda: predict(fsdp(even()), even(), COST, home="whole"), "owners"),
    ],
)
def test_bad_input_names_the_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()
