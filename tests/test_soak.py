"""``hf-laer soak``: short runs that must be good, and faults that a soak must find."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_laer.cli.main import main
from hf_laer.shard import exchange
from hf_laer.shard.home import Home, Layout
from hf_laer.soak.run import report, slope
from hf_laer.soak.task import Settings, batch
from tests.covering import nightly


def told(**changes: Any) -> dict[str, Any]:
    """One rank's account of a part of which nothing is to be said."""
    near = {"step": 0, "gradient": 1e-7, "update": 1e-7, "gradient_of": "a", "update_of": "b"}
    memory = [[step, 2**29 + 100 * step] for step in range(0, 500, 10)]
    good = {"losses": [1.0, 1.1] * 250, "evaluations": [1.0], "compared": [near], "lost": [], "memory": memory}
    return {**good, "before": 2.0, "after": 1.1, "spilled": 3, "moved": 0, **changes}


def verdicts(*parts: dict[str, Any], plain: list[float] | None = None) -> list[bool | None]:
    """Good, not good or neither, line by line."""
    return [line.good for line in report([[part] for part in parts], plain or [1.0, 1.1] * 250 * len(parts))]


def test_a_report_finds_what_is_wrong() -> None:
    far = {"step": 7, "gradient": 2e-5, "update": 1e-7, "gradient_of": "router", "update_of": "b"}
    leak = [[step, 2**29 + 2200 * step] for step in range(0, 500, 10)]
    assert verdicts(told(), told()) == [True, True, True, True, True, None]
    assert verdicts(told(), told(compared=[far])) == [False, True, True, True, True, None]
    assert verdicts(told(compared=[{**far, "gradient": 0.0, "update": 2e-5}])) == [True, False, True, True, True, None]
    assert verdicts(told(lost=["exp_avg of router"])) == [True, True, False, True, True, None]
    assert verdicts(told(), plain=[1.02, 1.12] * 250) == [True, True, True, False, True, None]
    assert verdicts(told(memory=leak)) == [True, True, True, True, False, None]
    assert verdicts(told(memory=leak[:9])) == [True, True, True, True, None, None]
    assert report([[told(before=0.0, after=0.0)]], [1.0])[-1].found == "no layer was run by hf_laer"


def test_slope_is_in_megabytes_per_thousand_steps() -> None:
    assert slope([[step, 10**9 + 3 * 2**20 * step // 1000] for step in range(0, 500, 10)]) == pytest.approx(3, rel=1e-3)


def test_what_is_left_out_of_memory_has_a_bound() -> None:
    """What is kept of slot tables seen: as much after 900 different ones as after 450, and a few megabytes."""
    rng, ranks, experts = np.random.default_rng(0), 8, 32
    layouts = [Layout.sharded(shape, 1, ranks) for shape in ((experts, 50, 34), (experts, 34, 25))]
    homes = {str(at): Home(nn.Parameter(torch.empty(0)), layout) for at, layout in enumerate(layouts)}

    def see(tables: int) -> int:
        for _ in range(tables):
            table = tuple(tuple(sorted(rng.choice(experts, 6, replace=False).tolist())) for _ in range(ranks))
            exchange.is_local(homes, table)
            exchange.beyond_own(homes, table)
            exchange.ways_of(homes, table, (), None, 0)
            for layout, other in itertools.product(layouts, range(ranks)):
                exchange.piece(layout, 0, table[other])
                exchange.piece(layout, other, table[0])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    exchange.forget_tables()
    tracemalloc.start()
    try:
        empty, some, more = see(0), see(450), see(450)
    finally:
        tracemalloc.stop()
        exchange.forget_tables()
    assert 2**19 < some - empty < 2**24, "nothing was kept, or too much"
    assert more - some < 0.05 * (some - empty)


def test_streams_do_not_depend_on_the_ranks_of_a_part() -> None:
    settings = Settings(steps=1000, ranks=4, part=300)
    assert settings.parts() == [(0, 300, 4), (300, 600, 2), (600, 900, 4), (900, 1000, 2)]
    assert settings.streams == 8
    assert Settings(ranks=3).streams == 6
    first, later = (batch(settings, step, 0).float().mean() for step in (0, 900))
    assert abs(first - later) > 1, "the data do not drift"


def test_bad_settings() -> None:
    assert main(["soak", "--steps", "0"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsep", *nightly("none")])
def test_a_short_soak(strategy: str, capsys) -> None:
    """Two ranks, then one that resumes; the unpatched model too, whose figures are the stack's own."""
    arguments = f"soak --strategy {strategy} --steps 16 --ranks 2 --part 8 --check 2 --evaluate 4"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert out.count("good") == 4
    assert "1 resumes, 0 tensors changed" in out


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["llep", "fsep+llep"])
def test_a_longer_soak(strategy: str, capsys) -> None:
    """Four ranks and two in turns, with resumes from four to two and back."""
    arguments = f"soak --strategy {strategy} --steps 150 --ranks 4 --part 50 --check 10 --evaluate 25"
    assert main(arguments.split()) == 0, capsys.readouterr().out
