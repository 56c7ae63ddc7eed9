"""Kernels are compiled for a GPU where there is none: what the interpreter takes the compiler may refuse.

Rows and blocks move 16 bytes at a time, which the compiler does only where it sees that they are aligned; what it sees
differs from one Triton to the next.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

ALIGNED = {(0,): [["tt.divisibility", 16]]}
PUT = {"columns": 2880, "BLOCK": 1024}
WHOLE = {**PUT, "behind": 256, "experts": 128, "TOLD": 128, "MESSAGES": True, "TELLS": True}
SUMS = {**PUT, "stride": 64 * 2880, "width": 4, "HAS_WEIGHTS": True, "HAS_BIAS": True}
MOVED = {"ALIGNED": True, "BLOCK": 4096, "STEPS": 2}
TYPES = {
    "source": "*bf16",
    "values": "*bf16",
    "out": "*bf16",
    "bias": "*bf16",
    "index": "*i64",
    "loads": "*i64",
    "table": "*i64",
    "slot": "*i64",
    "message": "*i32",
    "ends": "*i32",
    "weights": "*fp32",
    "scale": "fp32",
    "before": "fp32",
}


def compiled(module: str, name: str, constants: dict[str, Any], **types: str) -> str:
    """The PTX of a kernel for a GPU of compute capability 9.0."""
    import importlib

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"hf_laer.compute.kernels.{module}"), name)
    known, signature, values = TYPES | types, {}, {}
    for at, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[at,] = "constexpr", constants[argument]
        else:
            # Addresses are numbers.
            address = re.fullmatch(r"[bt]\d", argument)
            signature[argument] = known.get(argument, "i64" if address else "i32")
    source = ASTSource(kernel, signature, values, ALIGNED)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def wide_stores(ptx: str) -> int:
    """Stores of 16 bytes."""
    return len(re.findall(r"st\.global\.v(?:4\.b32|2\.b64)", ptx))


@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_are_put_whole(ranks: int) -> None:
    assert wide_stores(compiled("put", "_put_rows_kernel", {**PUT, "RANKS": ranks}))
    assert wide_stores(compiled("put", "_put_all_kernel", {**WHOLE, "RANKS": ranks}))
    assert wide_stores(compiled("rows", "_gather_sum_kernel", {**SUMS, "FROM": 0, "TO": ranks}))
    assert compiled("put", "_put_kernel", {"RANKS": ranks, "BLOCK": 2048}, source="*i64")
    assert compiled("rows", "_gather_sum_kernel", {**SUMS, "FROM": ranks, "TO": 0})


def test_blocks_are_copied_and_summed_whole() -> None:
    from triton import language as tl

    copied = {**MOVED, "TARGET": tl.bfloat16, "SOURCE": tl.float32}
    assert wide_stores(compiled("segments", "_copy_kernel", copied))
    summed = {**MOVED, "INTO": tl.float32, "OWN": tl.bfloat16, "OTHER": tl.float32, "READS": True}
    assert wide_stores(compiled("segments", "_sum_kernel", summed))
