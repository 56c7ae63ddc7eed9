"""Checkpoints: whole and sharded state dicts, resumed exactly; weights that need no hf_laer."""

from __future__ import annotations

import numpy as np
import pytest

from tests.covering import later
from tests.integrations import cases, cases_trl

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("llep", KINDS[0]), ("fsep", KINDS[1]), *later(("llep", KINDS[1]), ("fsep", KINDS[0]))],
)
def test_save_state_load_state(ranks, tmp_path, strategy: str, kind: str) -> None:
    ranks(2).run(cases.saved_and_loaded, folder=str(tmp_path), strategy=strategy, kind=kind)


@pytest.mark.parametrize("kind", [KINDS[0], *later(KINDS[1])])
def test_checkpoint_of_unpatched_model_resumes(ranks, tmp_path, kind: str) -> None:
    ranks(2).run(cases.baseline_checkpoint, folder=str(tmp_path), strategy="fsep", kind=kind)


@pytest.mark.parametrize("strategy", ["ep", "fsep"])
def test_save_pretrained_is_that_of_the_plain_model(ranks, tmp_path, strategy: str) -> None:
    ranks(2).run(cases.pretrained_round_trip, folder=str(tmp_path), strategy=strategy)


@pytest.mark.parametrize("kind", [*later(KINDS[0]), KINDS[1]])
def test_trainer_resumes(ranks, tmp_path, kind: str) -> None:
    counts = ranks(2).run(cases_trl.resumed, folder=str(tmp_path), strategy="fsep", kind=kind)
    assert counts[0]["moved"] > 0


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_train_again_then_save(ranks, tmp_path, strategy: str) -> None:
    ranks(2).run(cases_trl.trains_twice_and_saves, folder=str(tmp_path), strategy=strategy)


def test_fewer_ranks_resume_what_more_have_saved(ranks, tmp_path) -> None:
    """Four ranks, of which one owns nothing, save; two go on."""
    saved = ranks(4).run(cases.saves_with_empty_ranks, folder=str(tmp_path))
    loaded = ranks(2).run(cases.loads_on_fewer_ranks, folder=str(tmp_path))
    assert saved[0].keys() == loaded[0].keys()
    for name, value in saved[0].items():
        np.testing.assert_array_equal(value, loaded[0][name], err_msg=name)
