"""Pools of rank processes: one per world size and test session, to which cases are sent.

A case is a module-level function, called on every rank with its keyword arguments inside a gloo process group. A case
that outlasts its limit is killed with its pool, and the error shows where each rank stood.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CASE_SECONDS = 90.0
GROUP_SECONDS = 60.0


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stacks: Path


class RankFailure(AssertionError):
    """A case failed, or hung, on at least one rank."""


class RankPool:
    """``world_size`` processes in one gloo group.

    Args:
        world_size: Ranks.
        fresh: Started from scratch, each with its own hash seed, instead of forks of one process that has imported
            everything. An order that comes from a set would else be the same on all ranks in every test.
    """

    def __init__(self, world_size: int, fresh: bool = False) -> None:
        self.world_size = world_size
        self._fresh = fresh
        self._workers: list[_Worker] = []
        self._folder = ""

    def run(self, case: Callable[..., Any], *, seconds: float = CASE_SECONDS, **kwargs: Any) -> list[Any]:
        """Calls ``case(**kwargs)`` on every rank.

        Returns:
            Each rank's result, by rank.

        Raises:
            RankFailure: With the tracebacks of the ranks that failed or hung; the pool is rebuilt for the next case.
        """
        if not self._workers:
            self._start()
        message = pickle.dumps((case, kwargs))
        for worker in self._workers:
            worker.pipe.send_bytes(message)
        results, failures = self._collect(time.monotonic() + seconds)
        if failures:
            # Ranks that all failed by themselves stand alike; otherwise some collective may still wait for its match.
            dead = any(worker.process.exitcode is not None for worker in self._workers)
            if dead or len(failures) < self.world_size or any("hung" in failure for failure in failures):
                self.stop()
            raise RankFailure(f"{case.__module__}.{case.__name__}({kwargs})\n" + "\n".join(failures))
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Ends the processes; the next case starts new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], list[str]]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = dict(enumerate(self._workers))
        while waiting and time.monotonic() < deadline:
            ready = wait([worker.pipe for worker in waiting.values()], timeout=deadline - time.monotonic())
            for rank in [rank for rank, worker in waiting.items() if worker.pipe in ready]:
                good, value = self._receive(waiting.pop(rank))
                if good:
                    results[rank] = value
                else:
                    failures.append(f"--- rank {rank} failed ---\n{value}")
            if failures:
                # The others may wait for the failed one for ever: give them a moment to fail by themselves.
                deadline = min(deadline, time.monotonic() + 5)
        failures += [f"--- rank {rank} hung ---\n{self._stack(worker)}" for rank, worker in waiting.items()]
        return results, failures

    def _receive(self, worker: _Worker) -> tuple[bool, Any]:
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except EOFError:
            worker.process.join(5)
            return False, f"the process ended with exit code {worker.process.exitcode}"

    def _stack(self, worker: _Worker) -> str:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return worker.stacks.read_text() if worker.stacks.exists() else "no stack"

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="hf_laer_ranks_")
        context = _context(self._fresh)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder) / f"stacks-{rank}"
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self._folder, str(stacks), theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stacks))


def _context(fresh: bool) -> Any:
    if fresh:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _serve(rank: int, world_size: int, folder: str, stacks: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        OMP_NUM_THREADS="1",
    )
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        _join(rank, world_size, folder)
        seen = set()
        while True:
            try:
                case, kwargs = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(_outcome(case, kwargs))
            if case.__module__ not in seen:
                seen.add(case.__module__)
                _keep_what_is_imported()


def _keep_what_is_imported() -> None:
    """Spares collections what stays anyway: to look at it takes each half a second, and some cases collect often."""
    gc.collect()
    gc.freeze()


def _join(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_SECONDS)
    )


def _outcome(case: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((True, case(**kwargs)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
