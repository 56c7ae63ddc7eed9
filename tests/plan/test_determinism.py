"""B46: the same plan on every rank, whatever the thread, the hash seed and how often it is asked."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hf_laer.plan import (
    Placement,
    chunk_owners,
    compile_kernels,
    fsep,
    get_planner,
    laer_placement,
    llep,
    planner_summary,
)

PROGRAM = "from tests.plan.test_determinism import digests; print(*digests())"


def digests() -> list[str]:
    out = []
    tied = np.full((8, 8), 5)
    tied[:, 0] = 20
    drawn = np.random.default_rng(5).integers(0, 4, (8, 40))
    for loads in (tied, drawn):
        placement = laer_placement(loads, 8, 6, 4, candidates=8)
        settings = {"min_tokens_per_gemm": 1, "imbalance_threshold": 1.0}
        out += [
            llep(loads, chunk_owners(loads.shape[1], 8), **settings).digest(),
            fsep(loads, placement, 4).digest(),
            fsep(loads, Placement(placement.slots[::-1].copy()), 4).digest(),
        ]
    return out


def test_same_plan_every_time_on_every_thread():
    want = digests()
    assert all(digests() == want for _ in range(20))
    with ThreadPoolExecutor(8) as pool:
        assert all(got == want for got in pool.map(lambda _: digests(), range(16)))


def test_same_plan_in_other_processes():
    want = " ".join(digests())
    for seed, threads in (("0", "1"), ("7", "8")):
        env = os.environ | {"PYTHONHASHSEED": seed, "NUMBA_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == want


def test_compile_kernels_leaves_nothing_behind():
    before = digests()
    compile_kernels()
    assert digests() == before


def test_registry_names_every_planner_and_its_source():
    for name, line in planner_summary().items():
        assert re.search(r"arXiv|doi|USENIX", get_planner(name).__doc__ or ""), name
        assert line
