"""Where this rank is, and what it says when a collective fails or is waited for too long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

logger = logging.getLogger(__name__)
SPEAK_AFTER = 60.0
_ADVICE = (
    "another rank failed (look at its log), has fewer batches, or does something else; "
    "LaerConfig(check_collectives=True) says where ranks part"
)


@dataclass(frozen=True)
class Where:
    """A place in training.

    Args:
        layer: The MoE layer's name.
        phase: ``forward``, ``evaluation``, ``recompute`` or ``backward``.
        micro_batch: How many forwards the layer had before this one's, evaluations too.
    """

    layer: str = ""
    phase: str = "setup"
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.layer}, {self.phase} of micro-batch {self.micro_batch}" if self.layer else self.phase


class CollectiveError(RuntimeError):
    """A collective failed, timed out, or was not the one that the other ranks came to.

    Attributes:
        rank: This rank, of the world.
        collective: Which collective, and what travels.
        where: The layer, phase and micro-batch that issued it.
    """

    def __init__(self, message: str, rank: int, collective: str, where: Where) -> None:
        super().__init__(message)
        self.rank, self.collective, self.where = rank, collective, where

    def __reduce__(self) -> tuple[object, ...]:
        return CollectiveError, (str(self), self.rank, self.collective, self.where)


class Waiting:
    """A wait of the host, as a block: every collective passes here several times, and a generator would take longer.

    Args:
        watch: Told of it for as long as it lasts.
        collective: For what.
        where: Who asked for it.

    Attributes:
        since: When it began, by ``time.monotonic``.
    """

    __slots__ = ("collective", "since", "watch", "where")

    def __init__(self, watch: Watch, collective: str, where: Where) -> None:
        self.watch, self.collective, self.where, self.since = watch, collective, where, time.monotonic()

    def __enter__(self) -> None:
        self.watch.waiting = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        watch = self.watch
        watch.waiting, watch._speak_at = None, watch._first
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        seconds = time.monotonic() - self.since
        message = (
            f"rank {watch.rank}: the {self.collective} in {self.where} failed after {seconds:.1f} s: {error} "
            f"({_ADVICE})"
        )
        raise CollectiveError(message, watch.rank, self.collective, self.where) from error


class Watch:
    """Where this rank is; the communicators of an engine share one.

    A wait that outlasts a minute, or half the group's limit, is reported in the log, and again when it has doubled.
    That is all a rank can say under NCCL, whose watchdog ends the process at the limit; under gloo the wait itself
    raises then.

    Attributes:
        rank: This rank, of the world.
        limit: Seconds after which the process group gives up.
        where: Where this rank is now.
        waiting: What its host waits for now.
    """

    def __init__(self) -> None:
        self.rank, self.limit = 0, math.inf
        self.where = Where()
        self.waiting: Waiting | None = None
        self._speak_at = self._first = SPEAK_AFTER

    def begin(self, rank: int, limit: float) -> None:
        """Takes note of the rank and the limit, and begins to report long waits."""
        self.rank, self.limit = rank, limit
        self._speak_at = self._first = min(SPEAK_AFTER, limit / 2)
        _watched.add(self)
        _start_thread(self._first / 4)

    @contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """Says for a block that it runs on behalf of ``where``."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def waits(self, collective: str, where: Where) -> Waiting:
        """A block in which the host waits.

        Raises:
            CollectiveError: The block raised a ``RuntimeError``, which is chained.
        """
        return Waiting(self, collective, where)

    def look(self, now: float) -> None:
        """Reports the wait that is going on, if it is due; called from the watching thread."""
        waiting = self.waiting
        if waiting is None or now - waiting.since < self._speak_at:
            return
        self._speak_at = 2 * (now - waiting.since)
        logger.error(
            "rank %d has waited %.0f s for the %s in %s; the process group gives up after %.0f s. Perhaps %s",
            self.rank,
            now - waiting.since,
            waiting.collective,
            waiting.where,
            self.limit,
            _ADVICE,
        )


_watched: WeakSet[Watch] = WeakSet()
_lock = threading.Lock()
_sooner = threading.Event()
_interval = 5.0
_thread: threading.Thread | None = None


def _start_thread(interval: float) -> None:
    """One thread for all watches of the process; it reads and logs, and issues no collective."""
    global _interval, _thread
    with _lock:
        _interval = min(_interval, interval)
        _sooner.set()
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look_for_ever, name="hf_laer_watch", daemon=True)
            _thread.start()


def _look_for_ever() -> None:
    while True:
        _sooner.wait(_interval)
        _sooner.clear()
        now = time.monotonic()
        for watch in list(_watched):
            watch.look(now)
