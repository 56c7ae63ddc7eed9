"""What came of a suite, as tables: for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from hf_laer.bench.suite.cells import Kept
from hf_laer.sim.published import LLEP_FIGURE_4, SHARES

# What LLEP's figure 4 was measured on.
PUBLISHED_RANKS = 8


@dataclass(frozen=True)
class Section:
    """One table.

    Args:
        title: Above it.
        heads: Of the columns; the first ``words`` of them hold words.
        rows: Cells as they are shown.
        notes: Below it.
        words: See above.
    """

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    words: int = 2

    def as_table(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, caption="\n".join(self.notes) or None)
        for at, head in enumerate(self.heads):
            table.add_column(head, justify="left" if at < self.words else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """A heading, the table, the notes."""
        lines = [self.heads, ["---"] * self.words + ["--:"] * (len(self.heads) - self.words), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", table, *self.notes]) + "\n"


def sections(cells: Sequence[Kept], ranks: int) -> list[Section]:
    """The tables of what has been measured, and what has not and why."""
    made = [*_figure4(_of(cells, "figure4"), ranks), *_sweep(_of(cells, "sweep"))]
    made += [*_relayout(_of(cells, "relayout")), *_model(_of(cells, "model"))]
    left_out = [[cell.part, cell.name, cell.skipped] for cell in cells if cell.skipped]
    return made + ([Section("Left out", ("part", "cell", "why"), left_out, words=3)] if left_out else [])


def as_markdown(configuration: dict[str, Any], made: Iterable[Section], pictures: Sequence[str]) -> str:
    """The whole document."""
    told = "\n".join(f"- {key}: {value}" for key, value in configuration.items())
    images = "".join(f"![{name}]({name})\n" for name in pictures)
    return "\n".join([f"# hf-laer bench suite\n\n{told}\n", *(section.as_markdown() for section in made), images])


def _of(cells: Sequence[Kept], part: str) -> list[Kept]:
    return [cell for cell in cells if cell.part == part and cell.rows]


def by_contender(cell: Kept) -> dict[str, dict[str, Any]]:
    """The rows of a cell, by contender; ``auto`` by that name alone."""
    return {row["contender"].split(":")[0]: row for row in cell.rows}


@dataclass(frozen=True)
class Hot:
    """One cell of figure 4: ours beside plain EP.

    Args:
        layer: Its name.
        share: Of the tokens.
        hot: Experts that get it; 0 where balanced.
        ep: Plain EP's figures.
        llep: Ours.
        balanced: Ours where tokens are balanced, if measured.
        published: The paper's forward speed-up, on eight ranks.
    """

    layer: str
    share: float
    hot: int
    ep: dict[str, Any]
    llep: dict[str, Any]
    balanced: dict[str, Any] | None
    published: float | None

    @property
    def bound(self) -> float:
        """How much faster than plain EP it could be if ranks were level: plain EP's max/mean."""
        return float(self.ep["imbalance_before"])

    @property
    def speedup(self) -> float:
        """Forward, over plain EP."""
        return float(self.ep["forward_ms"] / self.llep["forward_ms"])

    @property
    def step_speedup(self) -> float:
        """Forward and backward."""
        return float(self.ep["step_ms"] / self.llep["step_ms"])

    def of_balanced(self, key: str) -> float | None:
        """The balanced run's figure over this one's."""
        return float(self.balanced[key] / self.llep[key]) if self.balanced and self.llep[key] else None


def hot_cells(cells: Sequence[Kept]) -> list[Hot]:
    """What figure 4 compares."""
    ours = [(cell, by_contender(cell)) for cell in _of(cells, "figure4") if {"ep", "llep"} <= set(by_contender(cell))]
    balanced = {cell.about["layer"]: rows["llep"] for cell, rows in ours if cell.about["hot"] == 0}
    found = []
    for cell, rows in ours:
        layer, share, hot = (cell.about[key] for key in ("layer", "share", "hot"))
        published = dict(zip(SHARES, LLEP_FIGURE_4.get((layer, hot), ()), strict=False)).get(share)
        found.append(Hot(layer, share, hot, rows["ep"], rows["llep"], balanced.get(layer), published))
    return found


def _figure4(cells: list[Kept], ranks: int) -> Iterator[Section]:
    found = hot_cells(cells)
    if found:
        heads: tuple[str, ...] = (
            "layer",
            "routing",
            "ep fwd",
            "llep fwd",
            "ratio",
            "bound",
            "of bound",
            "paper",
            "ep f+b",
            "llep f+b",
        )
        heads += ("ratio", "of ceiling", "ep GiB", "llep GiB", "of even")
        rows = [_hot_row(one, ranks) for one in found]
        title = f"LLEP's figure 4 on {ranks} ranks: one layer, us and plain EP"
        yield Section(title, heads, rows, _hot_notes(found, ranks))
    rivals = [cell for cell in cells if "llep" not in by_contender(cell)]
    if rivals:
        yield _rivals(rivals, found)


def _hot_row(one: Hot, ranks: int) -> list[str]:
    routing = f"{one.share:.0%} on {one.hot}" if one.hot else "balanced"
    published = f"{one.published:.2f}" if one.published and ranks == PUBLISHED_RANKS else ""
    ceiling, memory = one.of_balanced("step_ms"), one.of_balanced("peak_gb")
    return [
        one.layer,
        routing,
        f"{one.ep['forward_ms']:.2f}",
        f"{one.llep['forward_ms']:.2f}",
        f"{one.speedup:.2f}",
        f"{one.bound:.2f}",
        f"{one.speedup / one.bound:.0%}",
        published,
        f"{one.ep['step_ms']:.2f}",
        f"{one.llep['step_ms']:.2f}",
        f"{one.step_speedup:.2f}",
        "" if ceiling is None else f"{ceiling:.0%}",
        f"{one.ep['peak_gb']:.1f}",
        f"{one.llep['peak_gb']:.1f}",
        "" if not memory else f"{1 / memory:.2f}",
    ]


def _hot_notes(found: list[Hot], ranks: int) -> list[str]:
    skewed, even = [one for one in found if one.hot], [one for one in found if not one.hot]
    notes = [
        "Milliseconds, of the slowest rank. fwd: forward; f+b: forward and backward; bound: plain EP's max/mean over "
        "ranks, the forward speed-up if all were level; of ceiling: our balanced step over this one; GiB above weights "
        "and their gradients, of even: ours over our balanced run's."
    ]
    if ranks == PUBLISHED_RANKS:
        notes.append("paper: LLEP's forward speed-up over EP on 8 x H200.")
    if skewed:
        reached = sum(one.speedup >= 0.85 * one.bound for one in skewed)
        notes.append(f"At least 85% of the bound: {reached} of {len(skewed)} cells.")
        memory = [ratio for one in skewed if (ratio := one.of_balanced("peak_gb"))]
        within = sum(1 / ratio <= 1.1 for ratio in memory)
        notes += [f"Memory within 10% of the balanced run's: {within} of {len(memory)} cells."] if memory else []
    if even:
        least = min(one.speedup for one in even)
        notes.append(f"Balanced, least of plain EP's forward speed: {least:.3f} (wanted 0.98).")
    return notes


def _rivals(cells: list[Kept], found: list[Hot]) -> Section:
    ours = {(one.layer, one.share, one.hot): one.llep for one in found}
    rows = []
    for cell in cells:
        mine = ours.get((cell.about["layer"], cell.about["share"], cell.about["hot"]))
        for row in cell.rows:
            times = [f"{row['forward_ms']:.2f}", f"{row['step_ms']:.2f}", f"{row['peak_gb']:.1f}"]
            ratio = f"{row['step_ms'] / mine['step_ms']:.2f}" if mine else ""
            rows.append([cell.about["layer"], cell.about["routing"], row["contender"], *times, ratio])
    heads = ("layer", "routing", "rival", "fwd ms", "f+b ms", "GiB", "f+b over llep's")
    note = (
        "hf_a2a: Transformers' own all-to-all expert parallelism; fsdp_gather: all experts all-gathered, no tokens "
        "travel; gemm: the matrix products of a balanced share alone."
    )
    return Section("Rivals of figure 4", heads, rows, [note], words=3)


def sweep_points(cells: Sequence[Kept]) -> list[tuple[str, int, str, float, float]]:
    """What is swept, its value, routing, and plain EP's forward and step over ours; the base layer on each line."""
    found: list[tuple[dict[str, Any], float, float]] = []
    base: list[tuple[dict[str, Any], float, float]] = []
    for cell in _of(cells, "sweep"):
        rows, about = by_contender(cell), cell.about
        forward, step = (rows["ep"][key] / rows["llep"][key] for key in ("forward_ms", "step_ms"))
        (base if about["what"] == "base" else found).append((about, forward, step))
    axes = list(dict.fromkeys(about["what"] for about, *_ in found))
    points = [(about["what"], about["value"], about["routing"], *ratios) for about, *ratios in found]
    points += [(axis, about[axis], about["routing"], *ratios) for axis in axes for about, *ratios in base]
    return sorted(points, key=lambda point: (axes.index(point[0]), point[2], point[1]))


def _sweep(cells: list[Kept]) -> Iterator[Section]:
    points = sweep_points(cells)
    if points:
        rows = [[axis, routing, f"{value}", f"{fwd:.3f}", f"{step:.3f}"] for axis, value, routing, fwd, step in points]
        worst = min(points, key=lambda point: point[4])
        note = (
            f"Plain EP's time over ours. Worst step: {worst[4]:.3f} at {worst[0]} {worst[1]}, {worst[2]} (wanted 0.98)."
        )
        yield Section("LLEP's figures 6 and 9", ("swept", "routing", "value", "fwd", "f+b"), rows, [note])


def _relayout(cells: list[Kept]) -> Iterator[Section]:
    if not cells:
        return
    steps = {
        (cell.about["layer"], cell.about["routing"], row["contender"]): row["step_ms"]
        for cell in cells
        for row in cell.rows
    }
    rows = []
    for cell in sorted(cells, key=lambda one: (one.about["layer"], one.about["routing"])):
        (row,), layer, routing = cell.rows, cell.about["layer"], cell.about["routing"]
        figures = [f"{cell.about['slots']}", f"{row['step_ms']:.2f}", f"{row['exchange_ms'] / row['step_ms']:.1%}"]
        figures += [f"{row['imbalance_before']:.2f}", f"{row['imbalance_after']:.3f}", f"{row['peak_gb']:.1f}"]
        even, static = steps.get((layer, "balanced", "ep")), steps.get((layer, routing, "fsdp_ep"))
        figures.append(f"{even / row['step_ms']:.0%}" if even else "")
        figures.append(f"{static / row['step_ms']:.2f}" if static else "")
        rows.append([layer, routing, row["contender"], *figures])
    heads = ("layer", "routing", "planner", "slots", "step ms", "A2A", "owners", "planned", "GiB", "of ceiling")
    about = cells[0].about
    note = (
        f"{about['layers']} layers in a row, {about['tokens']} tokens per rank, mean step over drifting loads. A2A: "
        "what products wait for tokens, late ranks included, of the step; owners, planned: max/mean over ranks with "
        "static owners and as planned; of ceiling: plain EP's step with even tokens over this one. fsdp_ep, flexmoe "
        "and laer are those papers' planners on this engine; FlexMoE's moves of optimizer states are not paid for."
    )
    yield Section("LAER's comparison", (*heads, "over fsdp_ep"), rows, [note], words=3)


def _model(cells: list[Kept]) -> Iterator[Section]:
    rows = []
    for cell in cells:
        found = {row["routing"].split(":")[0]: row for row in cell.rows}
        for row in cell.rows:
            ceiling = found["balanced"]["step_ms"] / row["step_ms"] if "balanced" in found else None
            job = f"{cell.about['model']}, {cell.about['layers']} layers"
            figures = [f"{row['step_ms']:.1f}", f"{row['tokens_per_second']:.0f}", f"{row['peak_gb']:.1f}"]
            figures += ["" if ceiling is None else f"{ceiling:.0%}", f"{row['loss']:.3f}"]
            rows.append([job, row["routing"], row["contender"], *figures])
    if rows:
        heads = ("model", "routing", "contender", "step ms", "tokens/s per GPU", "GiB", "of force-balanced", "loss")
        rows.sort(key=lambda row: (row[0], row[1]))
        yield Section("Whole training steps", heads, rows, words=3)
