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
        self._last: set[str] = set()
        self._ended = True

    def enter(self, layer: str) -> None:
        """A layer's forward, not one that is recomputed."""
        if self._ended or layer in self._seen:
            self._begin(layer)
        elif self._seen:
            self._after[self._seen[-1]] = layer
            self._last.discard(self._seen[-1])
        self._seen.append(layer)

    def end(self) -> None:
        """A backward: the next forward begins a new pass."""
        self._ended = True

    def is_first(self) -> bool:
        """Whether the pass has had one layer so far."""
        return len(self._seen) == 1

    def after(self, layer: str) -> str:
        """The layer that came after ``layer``, maybe in the next pass; itself where that is not known."""
        return self._after.get(layer, layer)

    def after_in_pass(self, layer: str) -> str | None:
        """The layer that comes after it in the same pass, as far as is known."""
        return None if layer in self._last else self._after.get(layer)

    def _begin(self, layer: str) -> None:
        if self._seen:
            self._after[self._seen[-1]] = layer
            self._last.add(self._seen[-1])
        self.number += 1
        self._seen, self._ended = [], False
