"""The slot pool: room for unsharded experts, shared by all layers of an engine, or each layer's own."""

from __future__ import annotations

import math

import torch


class SlotPool:
    """One growing buffer per parameter name, dtype, device and set of slots.

    Slots are valid until their set is taken again. Where all layers share their sets nothing may keep them, and the
    pool's size is the largest layer's slots, whatever the number of layers.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device, int | str], torch.Tensor] = {}

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        keep: int = 0,
        which: int | str = 0,
    ) -> torch.Tensor:
        """A tensor of ``shape`` in a buffer for ``name``: its first ``keep`` slots as they were, no others.

        Args:
            name: The parameter's.
            shape: ``[S, …]``.
            dtype: Of the slots.
            device: Theirs.
            keep: Slots.
            which: Of several sets of slots.
        """
        key, numel = (name, dtype, device, which), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            kept = None if buffer is None or keep == 0 else buffer[: keep * math.prod(shape[1:])]
            self._buffers.pop(key, None)
            del buffer
            # An inference tensor could not be written to by the training that follows an evaluation.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
            if kept is not None:
                buffer[: len(kept)].copy_(kept)
        return (buffer if buffer.numel() == numel else buffer[:numel]).view(shape)

    def has(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, which: int | str = 0
    ) -> bool:
        """Whether :meth:`take` would make no new buffer."""
        buffer = self._buffers.get((name, dtype, device, which))
        return buffer is not None and buffer.numel() >= math.prod(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
