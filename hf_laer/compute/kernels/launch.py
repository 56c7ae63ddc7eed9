"""Launches of Triton kernels: what Triton works out at each one is looked up where it was launched alike before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton import knobs

# How a compiled kernel is run has been looked at in these versions of Triton, from the first to before the second.
_KNOWN = (3, 6), (3, 10)
_RUNS_DIRECTLY = _KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) < _KNOWN[1]
# Not there where torch has no GPUs.
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# By all that a kernel is compiled for. Kernels live as long as the program; to hash one takes half a microsecond.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    constants: Sequence[Any],
    **options: int,
) -> None:
    """Runs ``kernel[grid](*tensors, *numbers, *constants, **options)``.

    Triton takes 24 us of the host for a kernel of twelve arguments, and a layer launches a dozen in a step; half of it
    is to find that it has compiled that kernel before, and half of the rest to tell hooks, if there were any.

    Args:
        kernel: The jitted function.
        grid: Up to three sizes.
        tensors: Its first arguments.
        numbers: The next ones, which it must not be specialized for; below 2**31 where they are whole.
        constants: The rest.
        options: Triton's own.
    """
    # Of a number a launcher believes that it is an address, which it would ask a tensor and the driver for.
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    aligned = [address is None or address & 15 == 0 for address in addresses]
    device = next(tensor.get_device() for tensor in tensors if tensor is not None)
    key = (id(kernel), device, *dtypes, *aligned, *constants, *options.items())
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*tensors, *numbers, *constants, **options)
    else:
        _run(compiled, (*grid, 1, 1)[:3], device, (*addresses, *numbers, *constants))


def _run(compiled: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """As ``compiled[grid](*arguments)``."""
    if not _RUNS_DIRECTLY or _has_hooks():
        compiled[grid](*arguments)
    else:
        told = compiled.function, compiled.packed_metadata
        # No metadata and no hooks, before or after.
        compiled.run(*grid, _stream_of(device), *told, None, None, None, *arguments)


def _has_hooks() -> bool:
    """Whether somebody, such as Triton's profiler, asks to be told of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def cdiv(size: int, of: int) -> int:
    """How many parts ``of`` elements each ``size`` are, as ``triton.cdiv``, of which each call takes 2.5 us."""
    return -(-size // of)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a number of at least 1; for the same reason."""
    return 1 << (number - 1).bit_length()
