"""The commands' ranks end their process without a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Each rank ends right after a collective, of which one of gloo's threads still holds the tensor.
ENDS = """
import torch
import torch.distributed as dist
from hf_laer.cli.ranks import joined

held = []
with joined():
    held.append(dist.group.WORLD)  # as DTensor's caches hold it
    for _ in range(200):
        dist.broadcast(torch.ones(1), src=0)
    dist.all_to_all_single(torch.empty(8), torch.ones(8))
    dist.broadcast(torch.ones(1), src=0)
"""


@pytest.mark.nightly
def test_ranks_end_while_the_machine_is_busy(tmp_path: Path) -> None:
    """Eight processes keep any small machine busy; without a moment for gloo's threads, four runs in five abort."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8", str(script)]
    for _ in range(2):
        done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "terminate called" not in done.stderr
