"""The notebook runs from top to bottom, and its own checks hold."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "patch_model.ipynb"


@pytest.mark.long
@pytest.mark.timeout(480)
def test_notebook_runs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=400, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOK.parent))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "largest relative difference of a gradient" in printed
    assert "llep: mean" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_no_outputs_are_kept_in_the_source() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
