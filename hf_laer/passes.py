"""Passes over the model: which layer comes after which, learnt from the pass before; the same on all ranks."""

from __future__ import annotations


class Passes:
    """The order of the layers' calls.

    A forward pass begins after a backward, or with a layer that the pass has had already.

    Attributes:
        number: Passes begun.
    """

    def __init__(self) -> None:
        self.number = 0
        self._seen: list[str] = []
        self._after: dict[str, str] = {}
        self._ended = True

    def enter(self, layer: str) -> None:
        """A layer's forward, not one that is recomputed."""
        before = self._seen[-1] if self._seen else None
        if self._ended or layer in self._seen:
            if before is not None:
                self._after.pop(before, None)
            self.number += 1
            self._seen, self._ended = [], False
        elif before is not None:
            self._after[before] = layer
        self._seen.append(layer)

    def end(self) -> None:
        """A backward: the next forward begins a new pass."""
        self._ended = True

    def before(self) -> str | None:
        """The layer that came before the present one in the pass."""
        return self._seen[-2] if len(self._seen) > 1 else None

    def first(self) -> str | None:
        """The layer that began the pass, or the last one, where the next has not begun yet."""
        return self._seen[0] if self._seen else None

    def is_first(self) -> bool:
        """Whether the pass has had one layer so far."""
        return len(self._seen) == 1

    def after(self, layer: str) -> str | None:
        """The layer that comes after it in a pass, as far as is known."""
        return self._after.get(layer)
