"""Reports on routers and their auxiliary loss (section E): users get the installed Transformers' loss, no other."""

from __future__ import annotations

import pytest

from tests.models import assert_close
from tests.reports import cases_router as cases


@pytest.mark.parametrize("world_size", [1, 2])
def test_b67_padding_in_the_auxiliary_loss(ranks, world_size: int) -> None:
    ranks(world_size).run(cases.padding_is_left_out)


def test_b69_one_softmax(ranks) -> None:
    """E=8, K=2, a half each: 8.0 (balanced 2.0; of probabilities instead of logits 2.84)."""
    for theirs, ours in ranks(2).run(cases.all_to_two_experts):
        assert ours == theirs
        assert ours == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_b70_coefficient_without_the_flag(ranks, family: str) -> None:
    ranks(2).run(cases.switched, family=family)


@pytest.mark.long
def test_b70_by_trl(ranks, tmp_path) -> None:
    """TRL's coefficient switches the loss on and off; the callback says which."""
    (on, off), _ = ranks(2).run(cases.by_trl, folder=str(tmp_path), coefficients=[0.5, 0.0])
    assert len(on[0]) == 2
    assert off[0] == []
    assert "on (router_aux_loss_coef=0.5)" in on[1]
    assert "off" in off[1]


def test_b71_not_multiplied_by_the_ranks(ranks) -> None:
    """The same batch on every rank has the auxiliary gradient of one; unpatched at the same ranks is test_b70's."""
    alone = ranks(1).run(cases.ranks_of_auxiliary)[0]
    for of_rank in ranks(2).run(cases.ranks_of_auxiliary):
        assert of_rank.keys() == alone.keys()
        for name, grad in of_rank.items():
            assert_close(grad, alone[name], name)


@pytest.mark.parametrize(("family", "strategy"), [("qwen3_moe", "llep"), ("gpt_oss", "fsep"), ("mixtral", "ep")])
def test_b73_auxiliary_gradient(ranks, family: str, strategy: str) -> None:
    ranks(2).run(cases.auxiliary_alone, family=family, strategy=strategy)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_b74_router_logits_and_hooks(ranks, family: str) -> None:
    ranks(2).run(cases.logits_and_hooks, family=family)
