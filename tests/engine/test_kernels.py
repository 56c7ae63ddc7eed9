"""Each Triton kernel against its PyTorch reference, on the CPU by Triton's interpreter."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hf_laer.compute.gate import FusedGate, Gate, recognize
from hf_laer.compute.kernels import launch as launching
from hf_laer.compute.kernels.launch import cdiv, launch, next_power_of_2
from hf_laer.compute.rows import gather_sum, places
from hf_laer.compute.segments import Blocks, Part, add_parts, copy_all
from tests.engine.cases_puts import check_puts as check_writes
from tests.engine.cases_routing import KINDS, check_exchange

GATES = (FusedGate(False, False), FusedGate(True, False), FusedGate(True, True, 1.702, 7.0))


def check_gates() -> None:
    """Forward and backward, with and without bias, sizes that divide nothing, values on both sides of the clamp."""
    from hf_laer.compute.kernels.gate import gate_backward, gate_forward

    torch.manual_seed(0)
    slot = torch.tensor([0, 0, 0, 2, 2])
    for fused in GATES:
        gate = Gate(fused.reference)
        for bias in (None, torch.randn(3, 50)):
            up, grad, gates = torch.randn(5, 50) * 6, torch.randn(5, 25), torch.rand(5)
            torch.testing.assert_close(gate_forward(up, bias, slot, **vars(fused)), gate.forward(up, bias, slot))
            want = gate.backward(up, bias, slot, grad, gates)
            for overwrite in (False, True):
                kept = up.clone()
                got = gate_backward(kept, bias, slot, grad.clone(), gates, overwrite_up=overwrite, **vars(fused))
                for ours, theirs in zip(got, want, strict=True):
                    torch.testing.assert_close(ours, theirs)
                assert torch.equal(kept, up) != overwrite
            _check_half_gates(fused, up, bias, slot, grad, gates)


def check_gates_of_any_layout() -> None:
    """Words that begin at an odd place, a single row of a wider one, and numbers that are too wide for words."""
    from hf_laer import compute
    from hf_laer.compute.kernels.gate import gate_backward, gate_forward

    torch.manual_seed(0)
    slot, bias = torch.tensor([1]), torch.randn(2, 6)
    flat = torch.randn(1 + 6)
    for fused in GATES:
        gate, reference = Gate(fused.reference, fused), Gate(fused.reference)
        for up in (flat[1:].view(1, 6), flat.as_strided((1, 6), (7, 1)), flat[1:].double().view(1, 6)):
            base, grad, gates = bias.to(up.dtype), torch.ones(1, 3, dtype=up.dtype), torch.rand(1)
            want = reference.forward(up, base, slot), *reference.backward(up, base, slot, grad.clone(), gates)
            if up.dtype == torch.float64:
                with patch.object(compute.gate, "usable", lambda tensor: True):
                    got = gate.forward(up, base, slot), *gate.backward(up, base, slot, grad.clone(), gates)
            else:
                again = gate_backward(up.clone(), base, slot, grad.clone(), gates, overwrite_up=True, **vars(fused))
                got = gate_backward(up, base, slot, grad.clone(), gates, **vars(fused))
                for ours, theirs in zip(again, got, strict=True):
                    torch.testing.assert_close(ours, theirs)
                got = gate_forward(up, base, slot, **vars(fused)), *got
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs)


def _check_half_gates(
    fused: FusedGate,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    slot: torch.Tensor,
    grad: torch.Tensor,
    gates: torch.Tensor,
) -> None:
    """Two numbers of 16 bits in a word, against float32 from the same numbers."""
    from hf_laer.compute.kernels.gate import gate_backward, gate_forward

    gate = Gate(fused.reference)
    for dtype in (torch.bfloat16, torch.float16):
        up, grad, bias = (None if one is None else one.to(dtype) for one in (up, grad, bias))
        exact = (up.float(), None if bias is None else bias.float(), slot)
        near = {"rtol": 2e-2, "atol": 2e-2}
        got = gate_forward(up, bias, slot, **vars(fused))
        torch.testing.assert_close(got.float(), gate.forward(*exact), **near)
        found = gate_backward(up, bias, slot, grad.clone(), gates, **vars(fused))
        for ours, theirs in zip(found, gate.backward(*exact, grad.float(), gates), strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), **near)


def check_rows() -> None:
    """Rows with all, some and none of their places; weights and bias on and off; no rows at all."""
    from hf_laer.compute.kernels.rows import gather_sum as kernel

    torch.manual_seed(0)
    index = torch.tensor([3, 0, 3, 1, 3, 1])
    table, values = places(index, 5, 3), torch.randn(6, 37)
    weights, bias, slot = torch.rand(6), torch.randn(2, 37), torch.tensor([0, 0, 1, 1, 1, 1])
    for w in (None, weights):
        for b in (None, bias):
            want = gather_sum(values, table, torch.float32, weights=w, bias=b, slot=slot)
            torch.testing.assert_close(kernel(values, table, torch.float32, w, b, slot), want)
    assert kernel(values, table[:0], torch.float32, None, None, None).shape == (0, 37)


def check_retained_graph() -> None:
    """A second backward through the same graph, by which the first may not have overwritten anything."""
    from hf_laer import LaerConfig, compute, patch_model
    from tests.models import tiny_model

    model = tiny_model("qwen3_moe")
    patch_model(model, LaerConfig(strategy="ep"))
    ids = torch.arange(7).view(1, -1)
    with patch.object(compute.gate, "usable", lambda tensor: True):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], msg=name)


def check_routing() -> None:
    """Every table of a whole exchange, over sizes below and above a block, spread and piled up, ranks with nothing."""
    for tokens, top_k, experts, ranks in ((1, 1, 1, 1), (5, 3, 4, 3), (90, 4, 7, 3), (61, 8, 24, 5), (130, 3, 40, 2)):
        for skew in (0.0, 2.0):
            for kind in KINDS if tokens == 90 else KINDS[: 1 + (skew > 0)]:
                check_exchange(tokens, top_k, experts, ranks, skew, kind)


def check_puts() -> None:
    """Rows of odd sizes in every dtype, one rank that gets nothing, up to as many ranks as there may be."""
    for sizes in ((9, 2, 7, 3, 5), (4, 3, 16, 8, 8), (1, 1, 2, 2, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            check_writes(*sizes, dtype, "cpu")


def check_compiled_once() -> None:
    """Whatever a step's tokens, routing and plan, no kernel is compiled anew: what Triton compiles for is alike.

    Tokens odd and even, spread and piled up, a rank with one token, slots around a power of two, rows in chunks.
    """
    from triton.runtime.interpreter import InterpretedFunction

    seen: dict[tuple[str, Any, Any], set[Any]] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        # One for the experts' counts and one for the slots', whose keys lie differently; one where rows have room.
        found = seen.setdefault((kernel.__name__, named.get("PLACED"), named.get("STARTS")), set())
        found.add(tuple((name, _compiled_for(kernel, name, value)) for name, value in named.items()))
        run(kernel, *args, grid=grid, warmup=warmup, **options)

    run = InterpretedFunction.run
    with patch.object(InterpretedFunction, "run", note):
        for tokens, skew in ((30, 0.0), (31, 1.0), (30, 3.0), (43, 2.0)):
            check_exchange(tokens, 3, 60, 2, skew, "at home" if tokens == 43 else "llep")
        _check_chunks()
    names = {name for name, *_ in seen}
    assert names >= {"_count_kernel", "_open_kernel", "_leave_kernel", "_rows_kernel", "_arrive_kernel"}
    assert names >= {"_gather_sum_kernel", "_forward_kernel", "_backward_kernel"}
    assert all(len(found) == 1 for found in seen.values()), {
        key: found for key, found in seen.items() if len(found) > 1
    }


def _compiled_for(kernel: Any, name: str, value: Any) -> Any:
    """What of an argument a compiled kernel depends on."""
    constant = "constexpr" in str(kernel.fn.__annotations__.get(name, ""))
    if isinstance(value, torch.Tensor):
        return value.dtype, name in (kernel.kwargs["do_not_specialize_on_alignment"] or ()) or value.data_ptr() % 16
    if type(value) is not int or constant:
        return value if constant else type(value)
    return name in (kernel.kwargs["do_not_specialize"] or ()) or (value == 1, value % 16 == 0)


def _check_chunks() -> None:
    """What is cut out of others where rows come in chunks."""
    from hf_laer.compute.kernels.gate import gate_backward, gate_forward
    from hf_laer.compute.kernels.rows import gather_sum as kernel

    up, grad, gates, bias = torch.randn(9, 16), torch.randn(9, 8), torch.rand(9), torch.randn(2, 16)
    slot, table = torch.arange(9) // 5, torch.arange(9).view(9, 1)
    for rows in (slice(0, 4), slice(1, 4), slice(3, 9)):
        gate_forward(up[rows], bias, slot[rows], **vars(GATES[2]))
        gate_backward(up[rows], bias, slot[rows], grad[rows], gates[rows], **vars(GATES[2]))
        own = table[rows] - rows.start
        kernel(up[rows], own, torch.float32, gates[rows], bias, slot[rows])


def check_copies() -> None:
    """Between dtypes, with gaps between blocks and without, aligned and not, longer than a row of the table."""
    with patch("hf_laer.compute.kernels.segments.LONGEST", 96):
        for rows, columns in ((6, 5), (16, 4)):
            for dtype in (torch.float32, torch.bfloat16):
                _check_copies(rows, columns, dtype)


def _check_copies(rows: int, columns: int, dtype: torch.dtype) -> None:
    from hf_laer.compute.kernels.segments import copy_all as kernel

    source = torch.randn(5, rows, columns)
    got, want = (torch.zeros(7, 2 * rows, columns, dtype=dtype) for _ in range(2))
    places = [([1, 6, 3], range(rows, 2 * rows)), ([5], range(rows)), ([0], range(1, 3)), ([], range(rows))]
    givers = [([2, 0, 4], range(rows)), ([0], range(rows)), ([1], range(2, 4)), ([], range(rows))]
    sources = [Blocks(source, np.array(index, np.int64), part) for index, part in givers]
    for into, copy in ((got, kernel), (want, copy_all)):
        copy([Blocks(into, np.array(index, np.int64), part) for index, part in places], sources)
    # The interpreter cuts where the device rounds.
    torch.testing.assert_close(got, want, rtol=0.0 if dtype == torch.float32 else 1e-2, atol=0.0)
    torch.testing.assert_close(want[6, rows:], source[0].to(dtype))
    assert want.count_nonzero() == 4 * rows * columns + 2 * columns


def check_sums() -> None:
    """Blocks with none, one and several parts of two dtypes; what was there counts, in part, or is poison."""
    torch.manual_seed(0)
    wide, narrow = torch.randn(3, 12, 8), torch.randn(2, 6, 8, dtype=torch.bfloat16)
    parts = [
        Part.whole(torch.randn(4, 6, 8, dtype=torch.bfloat16)),
        Part(np.array([3, 1]), Blocks(wide, np.array([0, 2]), range(6, 12))),
        Part(np.array([1]), Blocks(wide, np.array([1]), range(6))),
        Part(np.array([2]), Blocks(narrow, np.array([1]), range(6))),
    ]
    with patch("hf_laer.compute.kernels.segments.LONGEST", 32):
        for dtype in (torch.float32, torch.bfloat16):
            for before in (0.0, 0.5, 1.0):
                for some in (parts, parts[1:3], parts[:1], []):
                    _check_sums(dtype, before, some)


def _check_sums(dtype: torch.dtype, before: float, parts: list[Part]) -> None:
    from hf_laer.compute.kernels.segments import add_parts as kernel

    start = torch.randn(4, 6, 8).to(dtype)
    if before == 0:
        start.fill_(torch.nan)
    got, want = start.clone(), start.clone()
    kernel(got, parts, before, 0.25)
    add_parts(want, parts, before, 0.25)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


CHECKS = ["check_gates", "check_rows", "check_routing", "check_compiled_once", "check_retained_graph", "check_copies"]
CHECKS += ["check_sums", "check_gates_of_any_layout", "check_puts"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each check; all are run in one process."""
    pytest.importorskip("triton")
    told = tmp_path_factory.mktemp("kernels") / "faults.json"
    command = [sys.executable, "-m", "tests.engine.interpreted", str(told)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(told.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_equals_reference(faults: dict[str, str], check: str) -> None:
    assert not faults[check], faults[check]


class _Kernel:
    """In place of a kernel: counts how often it is compiled, and notes the launches after that."""

    def __init__(self) -> None:
        self.compiled, self.launches = 0, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *told, **options: self._compile()

    def _compile(self) -> Any:
        self.compiled += 1
        noted = self.launches

        class Launcher:
            function, packed_metadata = "function", "metadata"

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *told: noted.append((grid, told))

            def run(self, *told: Any) -> None:
                assert told[3:9] == ("stream", "function", "metadata", None, None, None)
                noted.append((told[:3], told[9:]))

        return Launcher()


def test_how_compiled_kernels_are_run() -> None:
    """Triton's own launch hands its launcher what ours does."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    assert launching._RUNS_DIRECTLY, "another Triton: look at how CompiledKernel runs, then widen _KNOWN"
    source = inspect.getsource(compiler.CompiledKernel.__getitem__)
    call = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata, "
    call += "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
    assert call in " ".join(source.split())


@pytest.mark.parametrize("how", ["directly", "another Triton", "hooks"])
def test_compiled_kernels_get_addresses(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """And one that was compiled for other dtypes, alignments, constants or options is not taken."""
    pytest.importorskip("triton")
    monkeypatch.setattr(launching, "_stream_of", lambda device: "stream" if how == "directly" else None)
    monkeypatch.setattr(launching, "_RUNS_DIRECTLY", how != "another Triton")
    if how == "hooks":
        monkeypatch.setattr(launching.knobs.runtime.launch_exit_hook, "calls", [print])
    kernel, flat, more = _Kernel(), torch.zeros(64), torch.zeros(4, dtype=torch.int64)
    usual = flat[4:], None, more
    launch(kernel, (3,), usual, (5,), (7,), num_warps=4)
    launch(kernel, (2, 9), usual, (6,), (7,), num_warps=4)
    assert kernel.launches == [((2, 9, 1), (flat.data_ptr() + 16, None, more.data_ptr(), 6, 7))]
    others = (flat[5:], None, more), (flat[4:], more, more), (flat[4:].int(), None, more)
    for tensors, constant, warps in [(usual, 8, 4), (usual, 7, 8), *((one, 7, 4) for one in others)]:
        before = kernel.compiled
        launch(kernel, (3,), tensors, (5,), (constant,), num_warps=warps)
        assert kernel.compiled == before + 1


def test_sizes_as_triton_has_them() -> None:
    triton = pytest.importorskip("triton")
    numbers = [*range(1, 70), 1023, 1024, 1025, 2**20 + 1]
    assert [next_power_of_2(number) for number in numbers] == [triton.next_power_of_2(number) for number in numbers]
    pairs = [(size, of) for size in (0, *numbers) for of in (1, 7, 1024)]
    assert [cdiv(*pair) for pair in pairs] == [triton.cdiv(*pair) for pair in pairs]


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gates_are_recognized_by_their_values(gate: FusedGate) -> None:
    assert recognize(gate.reference, gate.alpha, gate.limit) == gate


def test_other_gates_are_not_recognized() -> None:
    assert recognize(lambda up: torch.nn.functional.gelu(up[:, :12]) * up[:, 12:], 1.0, 0.0) is None
    assert recognize(lambda up: up, 1.0, 0.0) is None


def test_places_and_sum_are_adjoint() -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 9, (40,))
    values = torch.randn(40, 5)
    want = torch.zeros(9, 5).index_add_(0, index, values)
    torch.testing.assert_close(gather_sum(values, places(index, 9, 12), torch.float32), want)
