"""Plans of groups, joined: every token once, none outside its group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import chunk_owners, fsep, fsep_placement, join_groups, llep, traffic
from tests.plan.oracles import check_plan


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_joined_groups(groups, size, experts, spilled, seed):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 30, (groups * size, experts)) * rng.integers(0, 5, experts)
    plans = []
    for start in range(0, len(loads), size):
        mine = loads[start : start + size]
        if spilled:
            plans.append(llep(mine, chunk_owners(experts, size), min_tokens_per_gemm=1, imbalance_threshold=1.0))
        else:
            slots = min(experts, -(-experts // size) + 1)
            plans.append(fsep(mine, fsep_placement(mine, size, slots)))
    joined = join_groups(plans, loads)
    check_plan(joined, loads)
    assert traffic(loads, joined.split, size, 1).foreign_nodes == 0
    assert joined.spilled == sum(plan.spilled for plan in plans)
    assert (joined.rank_loads == np.concatenate([plan.rank_loads for plan in plans])).all()


def test_groups_must_make_all_ranks():
    loads = np.ones((4, 2), np.int64)
    plan = llep(loads[:2], chunk_owners(2, 2))
    with pytest.raises(ValueError, match="do not make 4"):
        join_groups([plan], loads)
