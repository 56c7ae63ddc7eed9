"""Every public report that was collected is a test here, or a line of docs/limits.md."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
# Sections A to H: hangs, gradients, re-layout and logging, optimizer, router, checkpointing, saving, adapters.
# fmt: off
REPORTS = [
    "B01", "B02", "B05", "B06", "B08", "B09", "B10", "B11", "B12", "B13", "B14", "B16", "B17", "B19",
    "B20", "B23", "B24", "B26", "B28", "B29", "B30", "B36", "B37", "B38", "B41", "B42", "B43", "B45",
    "B46", "B49", "B50", "B53", "B54", "B55", "B56", "B57", "B59", "B60", "B61", "B62", "B63", "B66",
    "B67", "B69", "B70", "B71", "B73", "B74", "B75", "B77", "B79", "B81", "B83", "B84", "B86", "B88",
    "B89", "B90", "B92", "B93", "B94", "B95",
]
# fmt: on


def rows_with_tests() -> set[str]:
    """Ids in the names of this folder's test functions."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    return {found.upper() for found in re.findall(r"^def test_(b\d\d)_", sources, re.MULTILINE)}


def excused() -> set[str]:
    """Ids in the first column of the table in docs/limits.md."""
    text = (FOLDER.parents[1] / "docs" / "limits.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| (B\d\d) \|", text, re.MULTILINE))


def test_every_report_is_a_test_or_a_limit() -> None:
    missing = sorted(set(REPORTS) - rows_with_tests() - excused())
    assert not missing, f"neither tested nor in docs/limits.md: {missing}"
