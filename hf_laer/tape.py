"""Plans kept per checkpoint frame, so that a recompute replays the one its forward used.

"A recompute is running" does not say which: with several micro-batches in flight, a plan kept on a module or on an
autograd context is the wrong one. ``torch.utils.checkpoint`` calls its ``context_fn`` once per frame; the two
contexts that it gets here share one tape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass
class Tape:
    """What the MoE layers of one checkpoint frame decided, by layer, in order of their calls."""

    entries: dict[str, list[Any]] = field(default_factory=dict)

    def append(self, layer: str, entry: Any) -> None:
        """Records one call of ``layer``."""
        self.entries.setdefault(layer, []).append(entry)


@dataclass
class Recording:
    """The forward of a frame."""

    tape: Tape


@dataclass
class Replay:
    """One recompute of a frame; a graph kept for a second backward is recomputed again, from the start."""

    tape: Tape
    _next: dict[str, int] = field(default_factory=dict)

    def take(self, layer: str) -> Any:
        """The entry of this call of ``layer``.

        Raises:
            RuntimeError: The recompute calls the layer more often than the forward did.
        """
        at = self._next.get(layer, 0)
        entries = self.tape.entries.get(layer, [])
        if at >= len(entries):
            raise RuntimeError(
                f"{layer} runs more often in the recompute than in its forward ({len(entries)}): "
                "a checkpointed block must do the same in both"
            )
        self._next[layer] = at + 1
        return entries[at]


class _Frames(threading.local):
    """Autograd recomputes in its own threads; each sees only the frames that it entered."""

    def __init__(self) -> None:
        self.stack: list[Recording | Replay] = []


_frames = _Frames()


def current() -> Recording | Replay | None:
    """The innermost frame that this thread is in."""
    return _frames.stack[-1] if _frames.stack else None


@contextmanager
def _inside(frame: Callable[[], Recording | Replay]) -> Iterator[None]:
    _frames.stack.append(frame())
    try:
        yield
    finally:
        _frames.stack.pop()


class _Both(AbstractContextManager[None]):
    """Two contexts as one that can be entered again, which a kept graph's second recompute does."""

    def __init__(self, outer: AbstractContextManager[Any], inner: Callable[[], AbstractContextManager[Any]]) -> None:
        self._outer, self._inner = outer, inner
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._outer)
        stack.enter_context(self._inner())
        self._stacks.append(stack)

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stacks.pop().__exit__(*exc)


def taped(context_fn: ContextFn) -> ContextFn:
    """Adds a tape to a ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, whose own contexts still apply."""
    # A partial can be copied and pickled with its model, and is one of the forms that torch.compile knows.
    return partial(_contexts, context_fn)


def _contexts(context_fn: ContextFn) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one frame's forward and recompute."""
    forward, recompute = context_fn()
    tape = Tape()
    return (
        _Both(forward, lambda: _inside(lambda: Recording(tape))),
        _Both(recompute, lambda: _inside(lambda: Replay(tape))),
    )
