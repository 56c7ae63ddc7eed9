"""``hf-laer merge``: what ``save_pretrained`` of the plain model would have written, from shards; clear errors."""

from __future__ import annotations

import enum
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM

from hf_laer.cli.main import main
from hf_laer.integrations.transformers.merge import SHARDS, _aside, merge
from hf_laer.shard.saved import SavedTensors
from tests.integrations import rig_trl
from tests.models import FAMILIES, assert_close, tiny_model, tokens


def save_sharded(model: torch.nn.Module, folder: Path, wrap: bool = True) -> None:
    """As Accelerate does, from one process."""
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state} if wrap else state, storage_writer=dcp.FileSystemWriter(folder))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        more = load_file(path)
        assert not found.keys() & more.keys()
        found |= more
    return found


def assert_same_weights(ours: Path, theirs: Path) -> None:
    mine, others = weights(ours), weights(theirs)
    assert mine.keys() == others.keys()
    for name, value in others.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A Trainer-like checkpoint of a small Qwen3-MoE, beside the folder that it was trained from."""
    model = tiny_model("qwen3_moe")
    save_sharded(model, tmp_path / "checkpoint-3" / SHARDS)
    model.save_pretrained(tmp_path / "base")
    rig_trl.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "checkpoint-3"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_pieces(tmp_path: Path, family: str) -> None:
    """Layer by layer, and files of 9 kB: the keys, bytes and index that the class itself would write."""
    model = tiny_model(family, tie_word_embeddings=family in ("qwen3_moe", "gpt_oss"))
    save_sharded(model, tmp_path / "c" / SHARDS)
    model.save_pretrained(tmp_path / "base", max_shard_size="9KB")
    merge(tmp_path / "c", tmp_path / "out", model=str(tmp_path / "base"), max_shard_size="9KB")
    assert_same_weights(tmp_path / "out", tmp_path / "base")
    ours, theirs = (json.loads((tmp_path / at / "model.safetensors.index.json").read_text()) for at in ("out", "base"))
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert all((tmp_path / "out" / name).exists() for name in ours["weight_map"].values())
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "base" / name).read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = tokens(2, 5)
    assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits, "logits")


def test_command_writes_one_file_and_the_tokenizer(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = saved.parent / "base", saved.parent / "out"
    out.mkdir()
    assert main(["merge", str(saved), str(out), "--model", str(base)]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
    for path in base.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(saved.parent.glob("*.part"))


def test_shards_folder_bare_state_and_other_dtype(tmp_path: Path) -> None:
    """The folder of shards itself, a state dict that nothing wraps, config beside it; cast on the way."""
    model = tiny_model("mixtral")
    save_sharded(model, tmp_path / "shards", wrap=False)
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / "shards")
    merge(tmp_path / "shards", tmp_path / "out", dtype=torch.bfloat16, max_shard_size="20KB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "want")
    assert_same_weights(tmp_path / "out", tmp_path / "want")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_merged_says_why(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = saved.parent / "base", saved.parent / "out"
    shards, model = saved / SHARDS, f"--model={base}"

    def refused(*argv: str | Path) -> str:
        assert main(["merge", *map(str, argv)]) == 2
        assert not out.exists()
        assert not list(saved.parent.glob("*.part"))
        return capsys.readouterr().err

    assert "model.safetensors is whole already" in refused(base, out)
    assert "holds the checkpoints checkpoint-3, name one" in refused(saved.parent, out)
    assert "is no folder" in refused(saved / "nothing", out)
    assert "is not an empty folder" in refused(saved, base)
    assert "has no config.json: name the model" in refused(saved, out)
    assert "is no size" in refused(saved, out, model, "--max-shard-size", "big")
    tiny_model("qwen3_moe", num_hidden_layers=3).config.save_pretrained(saved.parent / "deep")
    assert "it lacks model.layers.2." in refused(saved, out, "--model", saved.parent / "deep")
    tiny_model("qwen3_moe", num_hidden_layers=1).config.save_pretrained(saved.parent / "flat")
    assert "the model has no model.layers.1." in refused(saved, out, "--model", saved.parent / "flat")
    tiny_model("qwen3_moe", num_experts=6).config.save_pretrained(saved.parent / "wide")
    assert "gate_up_proj is (7, 50, 34)" in refused(saved, out, "--model", saved.parent / "wide")
    (shards / "__0_0.distcp").rename(shards / "away")
    assert "lacks 1 of 1 shards: __0_0.distcp" in refused(saved, out, model)
    (shards / "__0_0.distcp").write_bytes((shards / "away").read_bytes()[:-100])
    assert "are cut: __0_0.distcp" in refused(saved, out, model)
    (shards / ".metadata").unlink()
    assert "the save was cut short" in refused(saved, out, model)
    (saved.parent / "out.part").mkdir()
    with pytest.raises(ValueError, match="another merge writes it, or one was killed"), _aside(out):
        pass


def test_adapters_are_no_checkpoint(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path / "c")
    save_sharded(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])), tmp_path / "c" / SHARDS)
    with pytest.raises(ValueError, match="holds adapters"):
        merge(tmp_path / "c", tmp_path / "out")


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_an_index_runs_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is a pickle: what would run code is refused, wherever it stands."""
    monkeypatch.chdir(saved)
    index = saved / SHARDS / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = _Runs()
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is no index.*it wants posix\.system"):
        SavedTensors(saved / SHARDS)
    assert not (saved / "ran").exists()


class _ByName(pickle.Pickler):
    """As early releases of Python 3.11 pickle enumerations, and any attribute of what is allowed."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, enum.Enum):
            return getattr, (type(thing), thing.name)
        return (getattr, (Metadata, "__init__")) if thing is _ByName else NotImplemented


def test_an_index_of_early_python_3_11(saved: Path) -> None:
    index = saved / SHARDS / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    with index.open("wb") as file:
        _ByName(file).dump(metadata)
    assert b"getattr" in index.read_bytes()
    read = SavedTensors(saved / SHARDS).tensors
    assert read == metadata.state_dict_metadata
    metadata.planner_data = _ByName
    with index.open("wb") as file:
        _ByName(file).dump(metadata)
    with pytest.raises(ValueError, match=r"\.metadata is no index.*it wants attributes"):
        SavedTensors(saved / SHARDS)


def test_an_index_points_nowhere_else(saved: Path) -> None:
    index = saved / SHARDS / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{SHARDS}/{info.relative_path}"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside of its folder"):
        SavedTensors(saved / SHARDS)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cut_and_flipped(saved: Path, data: st.DataObject) -> None:
    """Bytes changed in the index or in a shard: our error, or the tensors."""
    shutil.rmtree(saved / "fuzz", ignore_errors=True)
    shutil.copytree(saved / SHARDS, saved / "fuzz")
    path = saved / "fuzz" / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    fault = ""
    try:
        found = SavedTensors(saved / "fuzz")
        if sum(entry.size.numel() for entry in found.tensors.values()) < 10**6:  # else the model's shapes refuse it
            found.load({name: name for name in found.tensors})
    except ValueError as error:
        fault = str(error)
    assert not fault or "fuzz" in fault


@pytest.mark.long
def test_memory_is_bounded(tmp_path: Path) -> None:
    """280 MB in seven layers, merged in pieces of 40 MB: far less memory than the model needs."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 600, "num_experts": 22, "num_hidden_layers": 7}
    model = tiny_model("qwen3_moe", **sizes)
    total = sum(value.nbytes for value in model.state_dict().values())
    assert total > 280e6
    save_sharded(model, tmp_path / "c")
    model.config.save_pretrained(tmp_path / "c")
    code = (
        "import resource, sys, torch, transformers; from hf_laer.integrations.transformers.merge import merge\n"
        "transformers.Qwen3MoeForCausalLM; peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); merge(*sys.argv[1:], max_shard_size='40MB'); print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c"), str(tmp_path / "out")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]) * 1024
    assert grown < 0.6 * total, f"{grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of weights"
    model.save_pretrained(tmp_path / "want")
    assert_same_weights(tmp_path / "out", tmp_path / "want")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > total, "the measure sees weights"
