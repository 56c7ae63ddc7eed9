"""Files from strangers: traces, tables, profiles, configurations, memories. Whatever is in them, our errors come out.

No pickle is read, no code runs, no more memory is taken than the file has bytes for.
"""

from __future__ import annotations

import io
import json
import os
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_laer import LaerConfig, patch_model, unpatch_model
from hf_laer.integrations.transformers import get_engine
from hf_laer.integrations.trl import LaerCallback
from hf_laer.memory import check_memory
from hf_laer.plan import read_topology
from hf_laer.sim import Trace, load_trace, trace_from_csv
from hf_laer.sim import trace as trace_module
from tests.models import tiny_model, tokens

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXPERTS = {"model.layers.0.mlp.experts": 7}


def a_trace(tmp_path: Path) -> bytes:
    path = tmp_path / "good.npz"
    Trace(np.arange(48).reshape(2, 1, 4, 6), {"top_k": 2, "model": "m"}).save(path)
    return path.read_bytes()


def a_memory() -> dict[str, Any]:
    """Of one rank, as the engine of a model on one device takes it up."""
    tuner = {
        "seen": 3,
        "history": [[[1, 2, 3, 4, 5, 6, 7]]],
        "misses": {"last": 4, "mean": 3, "ema": 2, "trend": 1},
        "placements": [[[0, 1, 2, 3, 4, 5, 6]]],
    }
    return {"model.layers.0.mlp.experts": {"step": 3, "held": [[1, 1, 1, 1, 1, 1, 1]], "tuner": tuner}}


GOOD: dict[str, tuple[str, Callable[[Path], bytes], Callable[[Path], Any]]] = {
    "trace": ("t.npz", a_trace, load_trace),
    "table": ("t.csv", lambda _: b"step,layer,rank,expert,tokens\n0,0,0,1,5\n1,0,1,2,17\n", load_trace),
    "profile": ("t.json", lambda _: b'{"num_ranks": 8, "ranks_per_node": 4, "gemm_tokens": [16, 32]}', read_topology),
    "yaml": ("t.yaml", lambda _: yaml.safe_dump(LaerConfig().to_dict()).encode(), LaerConfig.from_file),
    "json": ("t.json", lambda _: json.dumps(LaerConfig().to_dict()).encode(), LaerConfig.from_file),
}


def outcome(read: Callable[[Path], Any], path: Path) -> Any:
    """What was read, or the error, which must be ours and name the file."""
    try:
        return read(path)
    except ValueError as error:
        caught = error
    assert path.name in str(caught), caught
    assert len(str(caught)) < 2000
    return caught


@pytest.mark.parametrize("kind", GOOD)
@FUZZ
@given(data=st.data())
def test_cut_and_flipped(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """A file cut anywhere, with bytes changed, doubled or put in."""
    name, make, read = GOOD[kind]
    content = bytearray(make(tmp_path))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        how = data.draw(st.sampled_from(["cut", "flip", "insert", "double"]))
        if how == "cut":
            del content[at:]
        elif how == "flip" and at < len(content):
            content[at] ^= data.draw(st.integers(1, 255))
        elif how == "insert":
            content[at:at] = data.draw(st.binary(max_size=8))
        else:
            content += content[at:]
    path = tmp_path / name
    path.write_bytes(content)
    outcome(read, path)


@pytest.mark.parametrize("kind", GOOD)
@FUZZ
@given(content=st.binary(max_size=300) | st.text(max_size=120).map(str.encode))
def test_anything_at_all(tmp_path: Path, kind: str, content: bytes) -> None:
    name, _, read = GOOD[kind]
    path = tmp_path / name
    path.write_bytes(content)
    outcome(read, path)


def npz(path: Path, compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def header(shape: str, descr: str = "'<i8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (64 - (10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


dtypes = st.sampled_from(["<i8", "<i4", "<u8", "<f8", "<f2", "<c8", "?", "<U3", "S3", "<M8[s]", "O", "i4,f8"])
values = st.sampled_from([0, 1, -1, 3, 2**31, 2**62, 0.5, float("nan"), float("inf"), -0.0])


@FUZZ
@given(
    shape=st.lists(st.integers(0, 3), max_size=5),
    dtype=dtypes,
    value=values,
    meta=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from(["top_k", "hidden", "slots", "x"]), inner) | st.lists(inner),
        max_leaves=6,
    ),
)
@example(shape=[1, 1, 2, 2], dtype="<i8", value=3, meta={"top_k": 2})
def test_arrays_of_any_kind(tmp_path: Path, shape: list[int], dtype: str, value: Any, meta: Any) -> None:
    """Wrong shapes, dtypes, negative, NaN, huge; and anything for meta."""
    loads = np.zeros(shape, dtype)
    if np.dtype(dtype).kind in "iuf":
        with np.errstate(all="ignore"):
            loads[...] = np.array(value).astype(dtype)
    path = npz(tmp_path / "t.npz", loads=npy(loads), meta=npy(np.array([json.dumps(meta)])))
    made = outcome(load_trace, path)
    if isinstance(made, Trace):
        assert len(shape) == 4
        assert made.loads.min() >= 0
        assert (made.loads == loads).all()
        assert all(isinstance(made.meta.get(name, 1), int) for name in trace_module.COUNTS)
    else:
        assert shape != [1, 1, 2, 2] or meta != {"top_k": 2} or value != 3


CLAIMS = {
    "entries": {"loads": header(f"(1, 1, 1, {2**40})")},
    "overflow": {"loads": header(f"({2**40}, {2**40}, {2**40}, 1)")},
    "negative": {"loads": header("(1, 1, -1, 4)") + bytes(32)},
    "more than there": {"loads": header("(1, 1, 2, 4)") + bytes(63)},
    "less than there": {"loads": header("(1, 1, 2, 4)") + bytes(65)},
    "pickle": {"loads": npy(np.array([[[[print]]]], dtype=object))},
    "long string": {"loads": npy(np.ones((1, 1, 1, 1), int)), "meta": header("(1,)", f"'<U{2**38}'")},
    "no string": {"loads": npy(np.ones((1, 1, 1, 1), int)), "meta": npy(np.array([1]))},
    "no json": {"loads": npy(np.ones((1, 1, 1, 1), int)), "meta": npy(np.array(["{"]))},
    "deep json": {"loads": npy(np.ones((1, 1, 1, 1), int)), "meta": npy(np.array(["[" * 100_000]))},
    "long header": {"loads": b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little") + bytes(50_000_000)},
    "nothing": {},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_are_checked_before_memory_is_taken(tmp_path: Path, claim: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(outcome(load_trace, npz(tmp_path / "t.npz", **CLAIMS[claim])), ValueError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much that packs well: refused by its size, before it is unpacked; and other packings are not unpacked."""
    monkeypatch.setattr(trace_module, "LARGEST_ENTRIES", 1000)
    loads = npy(np.zeros((10, 1, 10, 11), np.int64))
    with pytest.raises(ValueError, match=r"t\.npz.*loads claims shape \(10, 1, 10, 11\)"):
        load_trace(npz(tmp_path / "t.npz", loads=loads))
    with pytest.raises(ValueError, match="otherwise than NumPy"):
        load_trace(npz(tmp_path / "t.npz", zipfile.ZIP_BZIP2, loads=loads))
    table = tmp_path / "t.csv"
    table.write_text("step,expert,tokens\n1000,0,1\n")
    with pytest.raises(ValueError, match=r"t\.csv needs .*\(1001, 1, 1, 1\)"):
        trace_from_csv(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"step,expert,tokens\n{2**40},{2**40},1\n", "needs"),
        (f"step,expert,tokens\n0,0,{2**63}\n", "line 2: tokens"),
        (f"step,expert,tokens\n0,0,{2**61}\n0,0,{2**61}\n", "add up to"),
        ("step,expert,tokens\n0,0,nan\n", "line 2: tokens"),
        ("step,expert,tokens\n0,-1,3\n", "line 2: expert"),
        ("step,expert,tokens\n0,0\n", "line 2: 2 values in 3"),
        ("step,expert,tokens\n0,0,1,1\n", "line 2: 4 values in 3"),
        ("step,expert,tokens,tokens\n0,0,1,1\n", "twice"),
        ('step,expert,tokens\n0,0,"' + "1" * 200_000 + '"\n', "not a table"),
    ],
)
def test_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_trace(path)
    assert "t.csv" in str(caught.value)


NAMES = list(LaerConfig().to_dict())[:9]
BOMB = f"{NAMES[0]}: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at, name in enumerate(NAMES[1:], 1)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", BOMB, "one value for strategy"),
        ("c.yaml", BOMB.replace("strategy", "x"), "no setting x"),
        ("c.yaml", "strategy: &a [*a]", "one value for strategy"),
        ("c.yaml", "history: !!timestamp x", "readable"),
        ("c.yaml", "history: !!int ''", "readable"),
        ("c.yaml", "!!python/object/apply:os.system ['touch ran']", "readable"),
        ("c.yaml", "[" * 1200, "readable"),
        ("c.json", "[" * 100_000, "readable"),
        ("c.yaml", "false", "mapping"),
        ("c.json", "[]", "mapping"),
        ("c.json", '{"capacity_factor": NaN}', "capacity_factor"),
        ("c.json", '{"capacity_factor": 1e308}', "capacity_factor"),
        ("c.json", f'{{"history": {10**4000}}}', "history=inf"),
        ("c.json", f'{{"history": {2**40}}}', "history"),
        ("c.json", '{"strategy": "' + "x" * 100_000 + '"}', "strategy"),
        ("c.json", '{"strategy": {"ep": 1}}', "strategy"),
        ("c.yaml", "x" * 2_000_000, "2000000 bytes"),
    ],
)  # fmt: skip
def test_configurations(tmp_path: Path, name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_text(text)
    error = outcome(LaerConfig.from_file, path)
    assert isinstance(error, ValueError)
    assert message in str(error)
    assert os.listdir(tmp_path) == [name], "code ran"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_ranks", 2.5),
        ("num_ranks", True),
        ("num_ranks", 10**400),
        ("ranks_per_node", None),
        ("flops", float("nan")),
        ("flops", "fast"),
        ("intra_latency", float("nan")),
        ("inter_latency", float("inf")),
        ("gemm_tokens", "abc"),
        ("gemm_tokens", [16, "x"]),
        ("gemm_efficiency", [float("nan")] * 7),
        ("gemm_efficiency", {"16": 0.5}),
    ],
)
def test_profiles(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"num_ranks": 8, "ranks_per_node": 4, field: value}))
    error = outcome(read_topology, path)
    assert isinstance(error, ValueError)
    assert field in str(error)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return tiny_model("mixtral", num_hidden_layers=1)


def mutated(memory: Any, data: st.DataObject) -> Any:
    """The memory with one value, somewhere inside, replaced or taken out."""
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            nodes.append((node, key))
            walk(node[key])

    walk(memory)
    holder, key = data.draw(st.sampled_from(nodes))
    if data.draw(st.booleans()):
        del holder[key]
    else:
        strange = [None, "x", -1, 1.5, float("nan"), 2**70, [], {}, [[]], True, 9, [[1, 2], [3]]]
        holder[key] = data.draw(st.sampled_from(strange))
    return memory


@FUZZ
@given(data=st.data())
def test_memories(small: nn.Module, data: st.DataObject) -> None:
    """Whatever is wrong is said with the layer, and what passes can be trained on from."""
    memory = a_memory()
    for _ in range(data.draw(st.integers(1, 2))):
        if memory and all(isinstance(one, dict) for one in memory.values()):
            memory = mutated(memory, data)
    model = patch_model(small, LaerConfig(strategy="fsep"))
    engine = get_engine(model)
    assert engine is not None
    fault = ""
    try:
        engine.load_state_dict(memory)
    except ValueError as error:
        fault = str(error)
    if fault or not memory:
        assert "model.layers.0.mlp.experts" in fault or not memory
        assert engine.state_dict() == {}, "taken up whole, or not at all"
    else:
        ids = tokens(1, 3)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        (record,) = engine.recorder.drain()
        assert record.step == memory["model.layers.0.mlp.experts"]["step"] + 1
    unpatch_model(model)


def test_memories_of_another_model_or_none() -> None:
    check_memory(a_memory(), EXPERTS)
    assert check_memory(a_memory(), {"model.layers.9.mlp.experts": 7}) == {}
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: held is of 7 experts, the layer has 8"):
        check_memory(a_memory(), {"model.layers.0.mlp.experts": 8})
    with pytest.raises(ValueError, match="must be an object, got list"):
        check_memory([], EXPERTS)
    twice = a_memory()
    twice["model.layers.0.mlp.experts"]["tuner"]["placements"] = [[[1, 1]]]
    with pytest.raises(ValueError, match="expert 1 in more than one slot"):
        check_memory(twice, EXPERTS)
    nowhere = a_memory()
    nowhere["model.layers.0.mlp.experts"]["tuner"]["placements"] = [[[0, 1, 2, 3, 4, 5, -1]]]
    with pytest.raises(ValueError, match="expert 6 is in no slot"):
        check_memory(nowhere, EXPERTS)


@pytest.mark.parametrize("saved", [{"args": {}, "attributes": []}, "x", [], {"attributes": {"memory": [1]}}])
def test_trainer_state_names_its_field(saved: Any) -> None:
    """What ``trainer_state.json`` holds of the callback may be anything, too."""
    state = SimpleNamespace(global_step=0, is_world_process_zero=True, stateful_callbacks={"LaerCallback": saved})
    with pytest.raises(ValueError, match=r"stateful_callbacks\.LaerCallback\.attributes\.memory.*trainer_state\.json"):
        LaerCallback().on_train_begin(None, state, None, model=patch_model(tiny_model("mixtral")))
