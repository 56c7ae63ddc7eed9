"""Owners by torch.chunk's rule, and the two planners that look at no load."""

import numpy as np
import pytest
import torch

from hf_laer.plan import chunk_owners, ep, fsdp, imbalance
from tests.plan.oracles import check_plan, one_replica_per_slot, stays_home


@pytest.mark.parametrize("experts", [1, 4, 6, 9, 30, 128])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 11])
def test_owners_are_those_of_torch_chunk(experts, ranks):
    owners = chunk_owners(experts, ranks)
    for rank, chunk in enumerate(torch.arange(experts).chunk(ranks)):
        assert (owners[chunk.numpy()] == rank).all()
    assert owners.dtype == np.int64


def test_owners_need_an_expert_and_a_rank():
    with pytest.raises(ValueError, match="0 experts on 4 ranks"):
        chunk_owners(0, 4)


def test_ep_sends_all_to_the_owner():
    loads = np.arange(30 * 8).reshape(8, 30)
    plan = ep(loads, chunk_owners(30, 8))
    check_plan(plan, loads)
    assert one_replica_per_slot(plan)
    assert plan.placement.slots.shape == (8, 4)
    assert plan.placement.held_by(7).tolist() == [28, 29]
    assert plan.rank_loads[7] == loads[:, 28:].sum()
    assert plan.spilled == 0


def test_ep_with_more_ranks_than_experts():
    loads = np.ones((5, 2), np.int64)
    plan = ep(loads, chunk_owners(2, 5))
    check_plan(plan, loads)
    assert plan.rank_loads.tolist() == [5, 5, 0, 0, 0]


def test_fsdp_keeps_every_token_at_home():
    loads = np.random.default_rng(0).integers(0, 9, (4, 6))
    plan = fsdp(loads)
    check_plan(plan, loads)
    assert one_replica_per_slot(plan)
    assert stays_home(plan, loads) == loads.sum()
    assert (plan.rank_loads == loads.sum(axis=1)).all()


def test_imbalance_of_nothing_is_one():
    assert imbalance(ep(np.zeros((2, 4), np.int64), chunk_owners(4, 2)).rank_loads) == 1.0


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (np.zeros(4), r"shape \(4,\)"),
        (np.zeros((0, 4)), r"shape \(0, 4\)"),
        (np.array([[1.0, np.nan]]), "nan"),
        (np.array([[1.0, np.inf]]), "inf"),
        (np.array([[1.5, 2.0]]), "1.5"),
        (np.array([[1, -2]]), "rank 0, expert 1 has -2"),
        (np.array([[2**61, 2**61]]), "2\\*\\*62"),
        (np.array([[2**63]], np.uint64), "2\\*\\*62"),
        (np.array([["a"]]), "dtype"),
        (np.array([[True]]), "dtype"),
    ],
)
def test_bad_loads_name_the_numbers(loads, message):
    with pytest.raises(ValueError, match=message):
        fsdp(loads)


@pytest.mark.parametrize("owners", [[0, 1], [0, 1, 2], [0, -1, 1], [0.5, 0, 1]])
def test_bad_owners_are_refused(owners):
    with pytest.raises(ValueError, match="owners"):
        ep(np.ones((2, 3), np.int64), np.array(owners))


def test_whole_floats_and_small_ints_are_loads():
    want = fsdp(np.array([[3, 4]], np.int64)).digest()
    for dtype in (np.float32, np.int32, np.uint8):
        assert fsdp(np.array([[3, 4]], dtype)).digest() == want
