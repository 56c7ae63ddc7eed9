"""Nothing hangs: when a rank fails, the others end with an error that says where, within their group's time limit."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.covering import later, nightly, thinned
from tests.pool import RankFailure, RankPool
from tests.reports import cases_check, cases_faults

LIMIT = 3.0
WHERE = re.compile(
    r"rank (\d): the (all-gather|all-to-all|all-reduce) of (tokens|weights) in (model\.layers\.\d\.mlp\.experts), "
    r"(forward|backward|recompute)(?:, ahead)? of micro-batch (\d) failed after"
)


def check_told(results: list[dict], limit: float) -> list[re.Match[str]]:
    """Every other rank got our error, chained, with all it should name; in time."""
    found = []
    for rank in (0, 2):
        result = results[rank]
        assert result["kind"] == "CollectiveError", result
        assert result["cause"] == "RuntimeError"
        assert result["seconds"] < limit + 3
        match = WHERE.match(result["message"])
        assert match, result["message"]
        assert int(match[1]) == rank
        assert match[4] == result["layer"]
        found.append(match)
    return found


@pytest.mark.parametrize(("strategy", "fault"), [*later(("llep", "raises in forward")), ("fsep", "raises in backward")])
def test_a_rank_raises(ranks, tmp_path, strategy: str, fault: str) -> None:
    results = ranks(3).run(cases_faults.fails, folder=str(tmp_path), strategy=strategy, fault=fault, limit=LIMIT)
    assert results[1]["kind"] == "ArithmeticError"
    for match in check_told(results, LIMIT):
        assert match[4] == "model.layers.1.mlp.experts"
        assert (match[5], match[6]) == (fault.split()[-1], "1")


PHASES = ("forward", "backward", "recompute")
# Two of them are in the test above.
RAISES = [*itertools.product(("ep", "llep", "fsep", "fsep+llep", "fsdp"), PHASES)]
RAISES = [way for way in RAISES if way not in (("llep", "forward"), ("fsep", "backward"))]


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "phase"), thinned(RAISES, RAISES[::3]))
def test_a_rank_raises_under_any_strategy(ranks, tmp_path, strategy: str, phase: str) -> None:
    settings = {"strategy": strategy, "fault": f"raises in {phase}", "limit": LIMIT}
    results = ranks(3).run(cases_faults.fails, folder=str(tmp_path), **settings)
    assert results[1]["kind"] == "ArithmeticError"
    # Under fsdp all that a forward needs may have come ahead of it.
    late = ("backward",) if strategy == "fsdp" else ()
    phases = {"forward": ("forward", *late), "backward": ("backward",), "recompute": ("recompute", "backward")}
    for match in check_told(results, LIMIT):
        assert match[5] in phases[phase]
        assert match[6] == "1"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsep+llep", *nightly("ep", "fsep", "fsdp")])
def test_a_rank_has_fewer_batches_under_any_strategy(ranks, tmp_path, strategy: str) -> None:
    results = ranks(3).run(cases_faults.has_fewer_batches, folder=str(tmp_path), strategy=strategy, limit=LIMIT)
    assert not results[1]["kind"]
    for match in check_told(results, LIMIT):
        assert (match[5], match[6]) == ("forward", "2")


def test_a_rank_has_fewer_batches(ranks, tmp_path) -> None:
    results = ranks(3).run(cases_faults.has_fewer_batches, folder=str(tmp_path), strategy="llep", limit=LIMIT)
    assert not results[1]["kind"]
    for match in check_told(results, LIMIT):
        assert match.groups()[1:] == ("all-gather", "weights", "model.layers.0.mlp.experts", "forward", "2")


def test_a_late_rank_is_reported(ranks, tmp_path) -> None:
    messages = ranks(3).run(cases_faults.is_late, folder=str(tmp_path), limit=LIMIT)
    assert not messages[1]
    for rank in (0, 2):
        assert len(messages[rank]) == 1
        assert f"rank {rank} has waited" in messages[rank][0]
        assert "all-gather of weights in model.layers.0.mlp.experts, forward of micro-batch 1" in messages[rank][0]


def check_parted(results: list[dict], limit: float, *words: str) -> None:
    """Every rank got our error, at once, and it names rank 1 and all the words."""
    for rank, result in enumerate(results):
        assert result["kind"] == "CollectiveError", result
        assert result["seconds"] < limit
        assert f"check_collectives, rank {rank}, before" in result["message"]
        for word in words:
            assert word in result["message"], (word, result["message"])


FIRST, SECOND = (f"model.layers.{i}.mlp.experts" for i in (0, 1))


@pytest.mark.parametrize(
    ("fault", "strategy", "words"),
    [
        (
            "plan",
            "fsep",
            ["plan of weights", FIRST, "rank 1 is at", "differs in placement (", "micro-batch 1"],
        ),
        ("plan", "llep", ["plan of weights", FIRST, "rank 1 is at", "differs in placement (", "micro-batch 1"]),
        (
            "order",
            "llep",
            ["ranks 0, 2 are at the all-gather of weights", FIRST, "rank 1 is at", "differs in layer", SECOND],
        ),
        ("more", "fsep", ["rank 1 is at the all-to-all of weights", FIRST, "forward, ahead", "backward"]),
        ("more", "llep", ["rank 1 is at the all-gather of weights", FIRST, "micro-batch 2", "backward"]),
        ("sizes", "ep", ["rank 1 sends 2 rows to rank 2, which expects 1"]),
    ],
)
def test_ranks_that_part_are_told_where(ranks, tmp_path, fault: str, strategy: str, words: list[str]) -> None:
    limit = 30.0
    results = ranks(3).run(cases_check.parts, folder=str(tmp_path), fault=fault, strategy=strategy, limit=limit)
    check_parted(results, limit / 2, *words)


def test_a_rank_with_one_more_forward_is_told_who_does_not_come(ranks, tmp_path) -> None:
    results = ranks(3).run(cases_check.parts, folder=str(tmp_path), fault="evaluates", strategy="llep", limit=LIMIT)
    assert not results[0]["kind"]
    assert not results[2]["kind"]
    assert LIMIT <= results[1]["seconds"] < LIMIT + 3
    for rank in (0, 2):
        words = f"rank {rank} has not come in 3 s; its last was the all-to-all of tokens"
        assert words in results[1]["message"], results[1]["message"]
    assert f"in {FIRST}, backward of micro-batch 1" in results[1]["message"]


def test_a_forward_on_one_rank_is_found_before_fsdp_waits(ranks, tmp_path) -> None:
    results = ranks(3).run(cases_check.prepared, folder=str(tmp_path), limit=LIMIT)
    assert results[1]["kind"] == "CollectiveError", results[1]
    assert "call of weights" in results[1]["message"]
    assert "rank 0 has not come" in results[1]["message"]


@pytest.mark.long
def test_checked_training_equals_the_unpatched_model(ranks) -> None:
    checks = ranks(4).run(cases_check.sound, strategy="llep")
    assert min(checks) == max(checks) > 3 * 2 * 8
    ranks(4).run(cases_check.sound, strategy="fsep", group_size=2)


@pytest.mark.parametrize("strategy", ["llep", *nightly("ep", "fsep")])
def test_a_rank_dies(tmp_path, strategy: str) -> None:
    """Three ranks: of more, those that never wait for it itself end when the others do."""
    with pytest.raises(RankFailure, match="exit code -9"):
        RankPool(3).run(cases_faults.dies, folder=str(tmp_path), strategy=strategy)
    for rank in (0, 2):
        seconds, message = Path(tmp_path, f"{rank}.txt").read_text().split(" ", 1)
        assert float(seconds) < 5
        match = WHERE.match(message)
        assert match, message
        assert (match[1], match[4]) == (str(rank), "model.layers.1.mlp.experts")
