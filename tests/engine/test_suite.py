"""``hf-laer bench suite``: cells are measured once, and what cannot be is left out with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_laer.bench.routing import changes, of_counts, recorded, routing, routings
from hf_laer.bench.suite.cells import Kept
from hf_laer.bench.suite.report import hot_cells, sections
from hf_laer.cli.main import main
from hf_laer.sim.trace import Trace
from tests.engine import cases_suite

CPU = torch.device("cpu")
TRACES = Path(__file__).parents[2] / "docs" / "traces"


def by_name(out: Path) -> dict[str, dict]:
    cells = json.loads((out / "suite.json").read_text())["cells"]
    return {f"{cell['part']} {cell['name']}": cell for cell in cells}


@pytest.mark.long
def test_layers_are_measured_once(ranks, tmp_path: Path) -> None:
    """Every cell of the parts on layers; at the second start none runs, and another configuration is refused."""
    parts = ["--parts", "figure4,sweep,relayout"]
    assert ranks(2).run(cases_suite.suite_command, seconds=150, out=str(tmp_path), flags=parts) == [0, 0]
    cells = by_name(tmp_path)
    assert len(cells) == 3 + 5 + 3 * 3 + 1 + 7
    assert not [cell["skipped"] for cell in cells.values() if cell["skipped"]]
    hot = {row["contender"]: row for row in cells["figure4 tiny 80:2 ep llep"]["rows"]}
    assert set(hot) == {"ep", "llep"}
    # Six experts each, 80% of the choices on two of the first rank's, the rest even over ten.
    assert hot["ep"]["imbalance_before"] == pytest.approx(2 * (0.8 + 0.2 * 4 / 10), rel=0.03)
    for planner in ("fsdp_ep", "flexmoe", "laer", "fsep", "fsep+llep:sharded", "fsep+llep:whole", "llep"):
        (row,) = cells[f"relayout 8 experts, top-2 drift:0.9:0.7 {planner}"]["rows"]
        assert row["contender"] == planner
        assert row["exchange_ms"] > 0
    level = cells["relayout 8 experts, top-2 drift:0.9:0.7 fsep"]["rows"][0]
    assert level["imbalance_after"] < level["imbalance_before"]
    text = (tmp_path / "suite.md").read_text()
    assert "| tiny | 80% on 2 |" in text
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("figure4", "sweep", "relayout"))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert ranks(2).run(cases_suite.suite_command, out=str(tmp_path), flags=parts) == [0, 0]
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()} == before
    other = [*parts, "--trace", str(TRACES / "smollm2_8.npz")]
    assert ranks(2).run(cases_suite.suite_command, out=str(tmp_path), flags=other) == [2, 2]


def test_what_cannot_be_measured(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(cases_suite.odd_cells, out=str(tmp_path))
    assert second == (["refused", "good", "breaks", "started again", "after"], ["late", "good"])
    assert [one for one in first[0] if not one.startswith("part")] == second[0]
    assert first[1] == ["late"]
    kept = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "cells").glob("*.json")}
    assert {name: cell["skipped"] for name, cell in kept.items()} == {
        "part_large": "needs about 9 GiB per GPU, of 8",
        "part_refused": "no such thing",
        "part_good": "",
        "part_breaks": "failed on rank 1: OutOfMemoryError: no memory",
        "part_after": "",
    }
    assert not list((tmp_path / "cells").glob("*.tmp"))


@pytest.mark.parametrize("name", ["ep", "llep"])
def test_repeated_choices(ranks, name: str) -> None:
    ranks(2).run(cases_suite.contender_equals_fsdp, name=name, scenario="choices:80:1", steps=1)


@pytest.mark.parametrize("name", ["fsdp_ep", "flexmoe", "laer"])
def test_published_planners_compute_the_same(ranks, name: str) -> None:
    """And lay experts out anew while loads wander, but for the static one."""
    (held, _) = ranks(2).run(cases_suite.contender_equals_fsdp, name=name, scenario="drift:0.5:1.5", steps=6)
    assert (len({str(table) for table in held}) > 1) == (name != "fsdp_ep")


@pytest.mark.long
def test_whole_models(ranks, tmp_path: Path) -> None:
    """Every contender trains the same model on the same tokens and routing, recorded routing too: one loss."""
    flags = ["--parts", "model", "--trace", str(TRACES / "smollm2_8.npz")]
    assert ranks(2).run(cases_suite.suite_command, out=str(tmp_path), flags=flags, seconds=150) == [0, 0]
    cells = by_name(tmp_path)
    for model in ("tiny", "tiny-gpt-oss"):
        rows = [row for name, cell in cells.items() if name.startswith(f"model {model} ") for row in cell["rows"]]
        assert len(rows) == 9
        for one in {row["routing"] for row in rows}:
            losses = [row["loss"] for row in rows if row["routing"] == one]
            assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize(("useful", "code", "wanted"), [(2, 1, 3), (9, 0, 1)])
def test_ranks_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, useful: int, code: int, wanted: int
) -> None:
    """As long as a start leaves something behind, or until one ends well."""
    (tmp_path / "cells").mkdir()
    starts: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        starts.append(command)
        if len(starts) <= useful:
            (tmp_path / "cells" / f"{len(starts)}.json").write_text("{}")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench", "suite", "--gpus", "3", "--out", str(tmp_path), "--minutes", "1"]) == code
    assert len(starts) == wanted
    assert "--nproc_per_node=3" in starts[0]
    assert starts[0][starts[0].index("--minutes") + 1] == "1.0"


@pytest.mark.long
def test_starts_its_own_ranks(tmp_path: Path) -> None:
    flags = ["--gpus", "2", "--scale", "tiny", "--parts", "sweep", "--out", str(tmp_path)]
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    alone = {key: value for key, value in os.environ.items() if key not in launched} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hf_laer.cli", "bench", "suite", *flags], env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "suite.json").read_text())["ranks"] == 2
    assert "LLEP's figures 6 and 9" in done.stdout


@pytest.mark.parametrize(
    "flags", [["--parts", "figure5"], ["--gpus", "0"], ["--minutes", "-1"], ["--trace", "nowhere.npz"]]
)
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "suite", "--out", str(tmp_path / "out"), *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_choices_of_counts() -> None:
    counts = np.array([9, 0, 3, 5, 1])
    chosen = of_counts(counts, 9, 2, torch.Generator().manual_seed(1))
    assert np.bincount(chosen.reshape(-1).numpy(), minlength=5).tolist() == counts.tolist()
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    capped = of_counts(np.array([14, 0, 4]), 9, 2, torch.Generator().manual_seed(1))
    assert np.bincount(capped.reshape(-1).numpy(), minlength=3).tolist() == [9, 5, 4]


def test_routing_that_changes() -> None:
    sizes = 64, 8, 2
    for name in ("drift:0.9", "drift:0.5:1.5", f"trace:{TRACES / 'smollm2_8.npz'}"):
        assert changes(name)
        mine, other = (routings(name, sizes, rank, 3, CPU, 4) for rank in (0, 1))
        counts = [np.bincount(one.reshape(-1).numpy(), minlength=8) for one in mine]
        assert len(mine) == 4
        assert all((one.sort(1).values.diff(dim=1) > 0).all() for one in mine)
        assert (counts[0] != counts[1]).any()
        assert (mine[0] != other[0]).any()
        again = routings(name, sizes, 0, 3, CPU, 4)
        assert all((a == b).all() for a, b in zip(mine, again, strict=True))
        assert (routings(name, sizes, 0, 3, CPU, 4, layer=1)[0] != mine[0]).any()
    assert len(routings("80:2", sizes, 0, 3, CPU, 4)) == 1


def test_recorded_proportions() -> None:
    loads = np.zeros((2, 2, 1, 3), np.int64)
    loads[:, 0], loads[:, 1] = [5, 3, 2], [10, 0, 0]
    five = recorded(Trace(loads), (40, 5, 1), ranks=2, steps=3, layer=0)
    assert five.shape == (3, 2, 5)
    assert five[0, 0].tolist() == [10, 6, 4, 20, 0]
    assert recorded(Trace(loads), (10, 2, 1), 1, 1, 1)[0, 0].tolist() == [10, 0]


@pytest.mark.parametrize("name", ["drift:", "drift:often", "drift:1.5", "choices:80:0", "choices:80:7"])
def test_impossible_routing(name: str) -> None:
    with pytest.raises(ValueError, match=r"drift|rho|choices:80"):
        routings(name, (16, 8, 2), 0, 2, CPU, 2)


def test_fewer_hot_experts_than_choices() -> None:
    chosen = routing("choices:50:1", 16, 8, 2, 0, CPU)
    assert np.bincount(chosen.reshape(-1).numpy(), minlength=8)[0] == 16


def measured(contender: str, forward: float, step: float, imbalance: float, peak: float = 1.0) -> dict:
    figures = {"forward_ms": forward, "step_ms": step, "peak_gb": peak, "imbalance_before": imbalance}
    return {"contender": contender, **figures, "imbalance_after": 1.0}


def test_figures_of_the_tables() -> None:
    """Ratios by hand; the published figures only on as many ranks as they are from."""
    layer = {"layer": "gpt-oss-120b"}
    even = [measured("ep", 10, 30, 1.0), measured("llep", 12.5, 32, 1.0, 4.0)]
    hot = [measured("ep", 60, 200, 7.5), measured("llep", 10, 40, 7.5, 5.0)]
    cells = [
        Kept("figure4", "a", {**layer, "share": 0.0, "hot": 0, "routing": "balanced"}, even),
        Kept("figure4", "b", {**layer, "share": 0.95, "hot": 4, "routing": "95:4"}, hot),
        Kept("figure4", "c", {**layer, "share": 0.95, "hot": 4, "routing": "95:4"}, [measured("hf_a2a", 50, 100, 0)]),
        Kept("model", "d", {}, [], "too large"),
    ]
    one = hot_cells(cells)[1]
    assert (one.speedup, one.step_speedup, one.bound, one.published) == (6.0, 5.0, 7.5, 5.22)
    assert one.of_balanced("step_ms") == 0.8
    figure4, rivals, left_out = sections(cells, 8)
    assert figure4.rows[1][4:8] == ["6.00", "7.50", "80%", "5.22"]
    assert figure4.rows[1][-1] == "1.25"
    assert any("0 of 1 cells" in note for note in figure4.notes)
    assert any("0.800" in note for note in figure4.notes)
    assert rivals.rows[0][-1] == "2.50"
    assert left_out.rows == [["model", "d", "too large"]]
    assert sections(cells, 2)[0].rows[1][7] == ""
