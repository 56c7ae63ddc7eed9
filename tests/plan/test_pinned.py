"""Placements around pinned first copies: as a plain program would make them, and as level as the exact split needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer.plan import EMPTY, Placement, fsep, fsep_placement, imbalance, laer_placement
from hf_laer.plan.pinned import first_homes, with_replicas


@st.composite
def cases(draw):
    """Loads ``[E]``, owners, slots per rank, ranks of a node."""
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.integers(0, draw(st.sampled_from([2, 50, 10**9])), experts)
    most = -(-experts // ranks)
    owners = rng.permutation(np.repeat(np.arange(ranks), most))[:experts]
    return load, owners, ranks, min(most + draw(st.integers(0, 3)), experts), draw(st.sampled_from([1, 2, 4, 9]))


def plainly(load, owners, ranks, slots, width, count) -> list[list[int]]:
    """What ``with_replicas`` promises, with everything worked out anew for each copy."""
    rows = [np.flatnonzero(owners == rank).tolist() for rank in range(ranks)]
    closed: set[int] = set()

    def copies(expert):
        return sum(expert in row for row in rows)

    def held(rank):
        return sum((int(load[expert]) << 20) // copies(expert) for expert in rows[rank])

    while count > 0:
        open_for = [expert for expert in range(len(load)) if load[expert] > 0 and expert not in closed]
        if not open_for:
            break
        expert = max(open_for, key=lambda e: (load[e] / copies(e), -e))
        ties = [e for e in open_for if int(load[e]) * copies(expert) == int(load[expert]) * copies(e)]
        expert = min(ties)
        free = [rank for rank in range(ranks) if len(rows[rank]) < slots and expert not in rows[rank]]
        if not free:
            closed.add(expert)
            continue
        nodes = [rows[start : start + width] for start in range(0, ranks, width)]
        near = [sum(expert in row for row in nodes[rank // width]) for rank in range(ranks)]
        rows[min(free, key=lambda r: (near[r], held(r), r))].append(expert)
        count -= 1
    return rows


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 40))
def test_replicas_go_where_a_plain_program_puts_them(case, count):
    load, owners, ranks, slots, width = case
    table = with_replicas(load, owners, ranks, slots, width, count)
    assert [row[row != EMPTY].tolist() for row in table] == plainly(load, owners, ranks, slots, width, count)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([0, 250, 1000]))
def test_every_expert_has_a_place_and_slots_are_used(case, hedge):
    load, _, ranks, slots, width = case
    table = fsep_placement(load, ranks, slots, width, hedge_permille=hedge).slots
    assert table.shape == (ranks, slots)
    for row in table:
        filled = row[row != EMPTY]
        assert (row[len(filled) :] == EMPTY).all()
        assert len(set(filled)) == len(filled)
    assert set(range(len(load))) <= set(table.ravel().tolist())
    homes = np.bincount(first_homes(load + 1, ranks, slots, width), minlength=ranks)
    assert homes.max() <= -(-len(load) // ranks)
    # A slot stays empty only where the rank holds all experts already that the others could be given.
    assert (table == EMPTY).sum() <= max(0, slots - 1)


def test_the_hottest_are_dealt_over_the_nodes():
    """Eight of 64 experts get three quarters of the tokens; on one node they would draw the others' there."""
    load = np.full(64, 10)
    load[:8] = 200
    homes = first_homes(load, 32, 3, 8)
    assert np.bincount(homes[:8] // 8, minlength=4).tolist() == [2, 2, 2, 2]
    by_node = np.bincount(homes // 8, load, 4)
    assert by_node.max() <= 1.1 * by_node.mean()


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 8, 2), (32, 8, 2), (8, 16, 4), (8, 64, 10), (32, 64, 3)])
def test_what_is_left_above_the_mean_is_less_than_with_lists_of_copies(ranks, experts, slots):
    """Loads half of which no forecast knew: the exact split levels this placement better than LAER's order."""
    rng, above = np.random.default_rng(3), np.zeros(2)
    for _ in range(40):
        known, new = rng.standard_normal((2, experts))
        share = np.exp(0.8 * (np.sqrt(0.5) * known + np.sqrt(0.5) * new))
        expected = (1e6 * np.exp(0.8 * known)).astype(np.int64)
        now = rng.multinomial(4000, share / share.sum(), ranks)
        for at, placement in enumerate(
            (
                fsep_placement(expected, ranks, slots, 8),
                laer_placement(expected, ranks, slots, 8, candidates=1, hedge_permille=250),
            )
        ):
            above[at] += imbalance(fsep(now, placement, 8).rank_loads) - 1
    assert above[0] < above[1]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="hedge_permille=1001"):
        fsep_placement(np.ones(4, np.int64), 2, 2, hedge_permille=1001)
    with pytest.raises(ValueError, match="1 slots"):
        fsep_placement(np.ones(4, np.int64), 2, 1)
    assert isinstance(fsep_placement(np.zeros(4, np.int64), 2, 3), Placement)


@pytest.mark.parametrize("ranks", [8, 64])
def test_loads_without_their_ranks_have_the_same_limit(ranks):
    """The total of all ranks times their number fits int64, or is refused; at the limit the hottest has most copies."""
    limit = (2**62 - 1) // ranks
    load = np.array([limit - 9, 3, 3, 3])
    slots = fsep_placement(load, ranks, 3).slots
    copies = np.bincount(slots[slots != EMPTY], minlength=4)
    assert copies[0] == copies.max() == ranks
    for place in (fsep_placement, laer_placement):
        with pytest.raises(ValueError, match=f"on {ranks} ranks"):
            place(load + (load == load.max()), ranks, 3)
