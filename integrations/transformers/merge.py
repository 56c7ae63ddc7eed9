"""``hf-laer merge``: an ordinary Transformers checkpoint from a sharded one, in one process, without GPUs.

Names and layout on disk are those of the model class's own ``save_pretrained``, which for some families differ from
those in memory. It is called for a few layers at a time, so that memory is bounded by them, not by the model.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from hf_laer.shard.saved import INDEX, SavedTensors

SHARDS = "pytorch_model_fsdp_0"  # where Accelerate puts the first model's shards
COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("spiece.model", "chat_template*", "*processor_config.json"),
)
WEIGHTS, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def merge(
    directory: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    max_shard_size: str = "5GB",
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes the checkpoint aside, then renames it to ``out``.

    Args:
        directory: A checkpoint of Trainer or Accelerate with SHARDED_STATE_DICT, or its folder of shards.
        out: Does not exist, or is an empty folder.
        model: Folder or Hub name from which configuration and tokenizer come where ``directory`` has none.
        max_shard_size: Of one file; memory needed is two to three times this, or a layer where that is larger.
        dtype: Floating-point weights are cast to it; ``None`` keeps what was saved (float32 masters under mixed
            precision).

    Returns:
        The files in ``out``.

    Raises:
        ValueError: ``directory`` is no sharded checkpoint, is not whole, or does not fit the configuration; ``out`` is
            not free.
        OSError: A file cannot be read or written.
    """
    out, limit = Path(out), _bytes(max_shard_size)
    _check_free(out)
    shards, source = find_shards(Path(directory)), _source(Path(directory), model)
    saved = SavedTensors(shards)
    skeleton = _skeleton(source, dtype or _dtype(saved), shards)
    names = _stored_names(skeleton, saved)
    with _aside(out) as part:
        files = [
            file
            for number, piece in enumerate(_pieces(skeleton, saved, names, limit))
            for file in _save(skeleton, saved, piece, part / f"piece-{number}", dtype, limit)
        ]
        _assemble(part, files, skeleton.num_parameters())
        _copy_companions((source, Path(directory)), part)
    return sorted(out.iterdir())


def find_shards(directory: Path) -> Path:
    """The folder of the model's shards in a checkpoint.

    Raises:
        ValueError: There is none; says what the folder holds instead.
    """
    for folder in (directory, directory / SHARDS):
        if (folder / INDEX).is_file():
            return folder
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder")
    inside = [path.name for path in sorted(directory.iterdir())]
    if (directory / SHARDS).is_dir():
        raise ValueError(f"{directory / SHARDS} has no {INDEX}: the save was cut short, take an earlier checkpoint")
    whole = [name for name in inside if re.fullmatch(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)", name)]
    if whole:
        raise ValueError(f"{directory} is no sharded checkpoint: {', '.join(whole)[:200]} is whole already")
    last = [name for name in inside if re.fullmatch(r"checkpoint[-_]\d+", name)]
    hint = f": it holds the checkpoints {', '.join(last)[:200]}, name one" if last else ""
    raise ValueError(f"{directory} is no sharded checkpoint, it has neither {INDEX} nor {SHARDS}/{INDEX}{hint}")


def _source(directory: Path, model: str | None) -> Path:
    """The folder with ``config.json``."""
    if model is not None and Path(model).is_dir():
        return Path(model)
    if model is not None:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["config.json", "generation_config.json", *COMPANIONS]))
    for folder in (directory, directory.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(
        f"{directory} has no config.json: name the model that was trained with --model (folder or Hub name)"
    )


def _check_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name another one, or remove it")


def _bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?B?)", size.strip().upper())
    if found is None or found[2] not in _UNITS or int(found[1]) < 1:
        raise ValueError(f"max_shard_size={size!r} is no size: write 5GB, 500MB, ...")
    return int(found[1]) * _UNITS[found[2]]


def _dtype(saved: SavedTensors) -> torch.dtype:
    kinds = (entry.properties.dtype for entry in saved.tensors.values())
    return next((kind for kind in kinds if kind.is_floating_point), torch.float32)


def _skeleton(source: Path, dtype: torch.dtype, shards: Path) -> PreTrainedModel:
    """The model without memory for its weights."""
    config: PretrainedConfig = AutoConfig.from_pretrained(source)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if name and kind is None:
        raise ValueError(f"{source}/config.json names {name}, which transformers {transformers.__version__} has not")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    made = made.to(dtype)
    if (source / "generation_config.json").is_file() and made.can_generate():
        made.generation_config = GenerationConfig.from_pretrained(source)
    return made


def _stored_names(model: PreTrainedModel, saved: SavedTensors) -> dict[str, str]:
    """The stored name of each of the model's tensors. Of tied ones, one is enough.

    Raises:
        ValueError: Names or shapes do not fit the model.
    """
    own = model.state_dict(keep_vars=True)
    prefix = max(("model.", ""), key=lambda prefix: sum(prefix + name in saved.tensors for name in own))
    names = {name: prefix + name for name in own if prefix + name in saved.tensors}
    tied = {id(own[name]) for name in names}
    missing = [name for name, tensor in own.items() if name not in names and id(tensor) not in tied]
    known = set(names.values())
    foreign = [name.removeprefix(prefix) for name in saved.tensors if name not in known]
    if missing or foreign:
        raise ValueError(_unfit(model, saved, missing, foreign))
    for name, stored in names.items():
        there = tuple(saved.tensors[stored].size)
        if there != tuple(own[name].shape):
            raise ValueError(f"{name} is {there} in {saved.folder}, and {tuple(own[name].shape)} by the configuration")
    return names


def _unfit(model: PreTrainedModel, saved: SavedTensors, missing: list[str], foreign: list[str]) -> str:
    if any(".lora_" in name or ".base_layer." in name or "base_model.model." in name for name in foreign):
        return (
            f"{saved.folder} holds adapters (PEFT), which are no checkpoint of their own: load it into the trainer, "
            "then save_pretrained, or merge_and_unload first"
        )
    said = [
        f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("it lacks", missing), ("the model has no", foreign))
        if names
    ]
    return (
        f"{saved.folder} does not fit {type(model).__name__}: {'; '.join(said)}. Is --model the one that was trained?"
    )


def _pieces(
    model: PreTrainedModel, saved: SavedTensors, names: Mapping[str, str], limit: int
) -> Iterator[dict[str, str]]:
    """The names in pieces of up to ``limit`` bytes, layers kept whole: what is fused is so within a layer."""
    own = model.state_dict(keep_vars=True)
    uses: dict[int, int] = {}
    for tensor in own.values():
        uses[id(tensor)] = uses.get(id(tensor), 0) + 1

    def unit(name: str) -> str:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        return layer[0] if layer and uses[id(own[name])] == 1 else ""

    piece: dict[str, str] = {}
    for _, group in itertools.groupby(sorted(names, key=unit), key=unit):
        layer = {name: names[name] for name in group}
        if piece and sum(_size(saved, stored) for stored in (*piece.values(), *layer.values())) > limit:
            yield piece
            piece = {}
        piece |= layer
    yield piece


def _size(saved: SavedTensors, stored: str) -> int:
    entry = saved.tensors[stored]
    return entry.size.numel() * entry.properties.dtype.itemsize


def _save(
    model: PreTrainedModel,
    saved: SavedTensors,
    piece: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype | None,
    limit: int,
) -> list[Path]:
    """Some of the weights, as ``save_pretrained`` writes them; returns the files."""
    own = model.state_dict(keep_vars=True)
    state: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    for name, tensor in saved.load(piece).items():
        cast = dtype is not None and tensor.is_floating_point()
        # Tied tensors are one, by which save_pretrained knows them.
        state[name] = shared.setdefault(id(own[name]), tensor.to(dtype) if cast else tensor)
    model.save_pretrained(folder, state_dict=state, max_shard_size=limit)
    return sorted(folder.glob("*.safetensors"))


def _assemble(part: Path, files: list[Path], parameters: int) -> None:
    """The files of all pieces in one folder, with an index if they are several."""
    weights: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, "pt") as opened:
            found = list(opened.keys())
        again = weights.keys() & set(found)
        if again:
            raise RuntimeError(
                f"save_pretrained wrote {sorted(again)[:3]} for two layers: their names depend on each other"
            )
        weights |= dict.fromkeys(found, name)
        with open(file, "rb") as opened:
            total += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
        file.rename(part / name)
    for name in ("config.json", "generation_config.json"):
        written = part / "piece-0" / name
        if written.exists():
            written.rename(part / name)
    for piece in part.glob("piece-*"):
        shutil.rmtree(piece)
    if len(files) > 1:
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weights}
        (part / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_companions(folders: tuple[Path, ...], part: Path) -> None:
    """Tokenizer and processor files; those of a later folder win."""
    for folder in folders:
        for pattern in COMPANIONS:
            for path in folder.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, part / path.name)


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its name when all is written, and goes if anything fails."""
    part = out.with_name(f"{out.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.mkdir()
    except FileExistsError:
        raise ValueError(f"{part} exists: another merge writes it, or one was killed. If so, remove it") from None
    try:
        yield part
        for path in part.iterdir():
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        part.replace(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
