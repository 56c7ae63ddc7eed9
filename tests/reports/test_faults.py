"""Nothing hangs: when a rank fails, the others end with an error that says where, within their group's time limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import RankFailure, RankPool
from tests.reports import cases_faults

LIMIT = 3.0
WHERE = re.compile(
    r"rank (\d): the (all-gather|all-to-all|all-reduce) of (tokens|weights) in (model\.layers\.\d\.mlp\.experts), "
    r"(forward|backward) of micro-batch (\d) failed after"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes of these tests' own: what they break is nobody else's."""
    made = RankPool(3)
    yield made
    made.stop()


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


@pytest.mark.parametrize(("strategy", "fault"), [("llep", "raises in forward"), ("fsep", "raises in backward")])
def test_a_rank_raises(pool, tmp_path, strategy: str, fault: str) -> None:
    results = pool.run(cases_faults.fails, folder=str(tmp_path), strategy=strategy, fault=fault, limit=LIMIT)
    assert results[1]["kind"] == "ArithmeticError"
    for match in check_told(results, LIMIT):
        assert match[4] == "model.layers.1.mlp.experts"
        assert (match[5], match[6]) == (fault.split()[-1], "1")


def test_a_rank_has_fewer_batches(pool, tmp_path) -> None:
    results = pool.run(cases_faults.has_fewer_batches, folder=str(tmp_path), strategy="llep", limit=LIMIT)
    assert not results[1]["kind"]
    for match in check_told(results, LIMIT):
        assert match.groups()[1:] == ("all-gather", "weights", "model.layers.0.mlp.experts", "forward", "2")


def test_a_late_rank_is_reported(pool, tmp_path) -> None:
    messages = pool.run(cases_faults.is_late, folder=str(tmp_path), limit=LIMIT)
    assert not messages[1]
    for rank in (0, 2):
        assert len(messages[rank]) == 1
        assert f"rank {rank} has waited" in messages[rank][0]
        assert "all-gather of weights in model.layers.0.mlp.experts, forward of micro-batch 1" in messages[rank][0]


def test_a_rank_dies(pool, tmp_path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        pool.run(cases_faults.dies, folder=str(tmp_path))
    for rank in (0, 2):
        seconds, message = Path(tmp_path, f"{rank}.txt").read_text().split(" ", 1)
        assert float(seconds) < 5
        match = WHERE.match(message)
        assert match, message
        assert (match[1], match[4]) == (str(rank), "model.layers.1.mlp.experts")
