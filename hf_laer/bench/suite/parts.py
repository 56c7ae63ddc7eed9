"""The parts of the suite and their cells."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_laer.bench.layer import Bench, LayerShape
from hf_laer.bench.models import FSDP2, MODELS, NATIVE, Job
from hf_laer.bench.rivals import Rivals
from hf_laer.bench.suite.cells import GIB, Cell
from hf_laer.choice import LayerSizes
from hf_laer.config import AUTO
from hf_laer.plan import chunk_owners, ep, predict
from hf_laer.profile import Profile, shipped_profile
from hf_laer.sim.published import LAYERS, SHARES, Layer

# One prepared contender of ``hf-laer bench sft``, which trains under one routing after another.
Trainer = Callable[[Job, str, Sequence[str], torch.device], list[dict[str, Any]]]
OURS = ("ep", "llep")
RELAYOUT = ("fsdp_ep", "flexmoe", "laer", "fsep", "fsep+llep:sharded", "fsep+llep:whole", "llep")
MODEL = (AUTO, FSDP2, NATIVE)


@dataclass(frozen=True)
class Scale:
    """How large and how long everything is.

    Args:
        layers: Of LLEP's figure 4.
        hot: Hot experts there.
        shares: Of the tokens, that they get.
        base: The layer around which the sweep goes.
        sweep: Values of each size there; ``hidden`` is the intermediate size too.
        mixtral: Layers of LAER's comparison, each with slots per rank and the spread of popularities.
        drifts: Correlations of loads from one step to the next there.
        stack: So many of them in a row.
        models: Jobs of whole training, without the settings of ``LaerConfig``.
        iterations: Timed, each time that a contender's turn comes.
        blocks: Its turns.
    """

    layers: tuple[Layer, ...]
    hot: tuple[int, ...]
    shares: tuple[float, ...]
    base: Layer
    sweep: dict[str, tuple[int, ...]]
    mixtral: tuple[tuple[Layer, int, float], ...]
    drifts: tuple[float, ...]
    stack: int
    models: tuple[Job, ...]
    iterations: int
    blocks: int


def _job(model: str, layers: int, rows: int, length: int, steps: int, checkpointing: bool) -> Job:
    return Job(model, layers, rows, length, steps, checkpointing, None, {})


SCALES = {
    "full": Scale(
        layers=LAYERS,
        hot=(4, 16, 1),
        shares=SHARES[::-1],
        base=Layer("base", 128, 2048, 2048, 4, 16384),
        sweep={
            "tokens": (4096, 8192, 16384, 32768, 65536),
            "hidden": (1024, 2048, 4096),
            "experts": (16, 32, 64, 128, 256),
        },
        # As many parameters in a layer with 16 experts as with 8.
        mixtral=(
            (Layer("8 experts, top-2", 8, 4096, 14336, 2, 8192), 2, 0.7),
            (Layer("16 experts, top-4", 16, 4096, 7168, 4, 8192), 4, 0.93),
        ),
        drifts=(0.9, 0.5),
        stack=4,
        models=(
            _job("qwen3-30b-a3b", 8, 2, 4096, 5, False),
            # Its attention has no fused kernel in Transformers: only checkpointed does a sequence of 4096 fit.
            _job("gpt-oss-20b", 8, 1, 4096, 5, True),
        ),
        iterations=3,
        blocks=3,
    ),
    "tiny": Scale(
        layers=(Layer("tiny", 12, 8, 12, 2, 48),),
        hot=(2, 1),
        shares=(0.8,),
        base=Layer("base", 8, 8, 8, 2, 32),
        sweep={"tokens": (32, 64), "experts": (8, 16)},
        mixtral=((Layer("8 experts, top-2", 8, 8, 12, 2, 32), 2, 0.7),),
        drifts=(0.9,),
        stack=2,
        models=(_job("tiny", 2, 2, 9, 2, False), _job("tiny-gpt-oss", 2, 1, 9, 2, True)),
        iterations=1,
        blocks=1,
    ),
}


@dataclass
class Setup:
    """What all parts are measured with.

    Args:
        scale: Sizes.
        device: This rank's.
        rivals: Contenders that are not the engine's, by name.
        train: Trains a whole model.
        profile: By which strategies are chosen and spilling is weighed; ``None`` means what is shipped.
        profile_path: Where that was read.
        trace: Recorded routing for whole models; ``None`` means loads that wander.
        model_layers: Decoder layers of whole models; ``None`` means the scale's.
    """

    scale: Scale
    device: torch.device
    rivals: Rivals
    train: Trainer
    profile: Profile | None = None
    profile_path: Path | None = None
    trace: Path | None = None
    model_layers: int | None = None
    _bench: dict[Any, Bench] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and tokens."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def bench(self, shape: LayerShape, group: str, **settings: Any) -> Bench:
        """The bench of these layers; that of others before is given up, with its memory."""
        key = shape, group
        if key not in self._bench:
            self.give_up()
            told = {"settings": {"history": 1}} | settings
            self._bench[key] = Bench(shape, self.device, self.dtype, self.rivals, self.profile, **told)
        return self._bench[key]

    def give_up(self) -> None:
        """Frees the memory of the bench before."""
        self._bench.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def layers(
        self, part: str, layer: Layer, contenders: Sequence[str], routing: str, group: str, **about: Any
    ) -> Cell:
        """A cell in which contenders run one layer under one routing, in turns."""
        shape = _shape(layer)

        def run() -> list[dict[str, Any]]:
            bench = self.bench(shape, group)
            found = bench.measure(contenders, routing, self.scale.iterations, self.scale.blocks)
            return [one.as_dict() for one in found]

        name = f"{layer.name} {routing} {' '.join(contenders)}"
        about = {"layer": layer.name, "routing": routing, **vars(shape), **about}
        return Cell(part, name, run, about, self.need(layer, contenders, routing))

    def need(self, layer: Layer, contenders: Sequence[str], routing: str) -> float:
        """GiB on the fullest GPU: the experts whole, as every rank makes them, then those at home and their gradients,
        and what the most loaded rank has of rows, of which Transformers' exchange was seen to keep three times as much.
        """
        ranks = dist.get_world_size()
        share, hot = (0.0, 1) if ":" not in routing else map(int, routing.removeprefix("choices:").split(":"))
        loads = layer.loads(share / 100, int(hot), ranks)
        machine = (self.profile or shipped_profile("NVIDIA H200")).of_ranks(ranks, ranks)
        sizes = LayerSizes(layer.experts, layer.hidden, layer.intermediate, layer.top_k)
        owners = chunk_owners(layer.experts, ranks)
        cost = sizes.cost(machine, 0)
        found = predict(ep(loads, owners), loads, cost, home="whole", owners=owners).predicted
        assert found is not None
        whole, at_home = layer.experts * cost.expert_bytes, 2 * layer.experts * cost.expert_bytes / ranks
        rows = (found.peak_bytes.max() - at_home) * (3 if "hf_a2a" in contenders else 1.25)
        gathered = 2 * whole if "fsdp_gather" in contenders else 0
        return float(max(whole * (1 + 1 / ranks), at_home + rows + gathered)) / GIB


def _shape(layer: Layer, layers: int = 1) -> LayerShape:
    return LayerShape(layer.experts, layer.hidden, layer.intermediate, layer.top_k, layer.tokens, layers)


def hot_routing(layer: Layer, share: float, hot: int) -> str:
    """``share`` of the choices on ``hot`` experts; with fewer than K a token must name one of them more than once."""
    name = f"{round(share * 100)}:{hot}"
    return name if hot >= layer.top_k else f"choices:{name}"


def figure4(setup: Setup) -> Iterator[Cell]:
    """LLEP's figure 4: layers of well-known models, so many hot experts with such a share of the tokens."""
    for layer in setup.scale.layers:
        pairs = [(share, hot) for hot in setup.scale.hot for share in setup.scale.shares]
        hot = {hot_routing(layer, share, hot): {"share": share, "hot": hot} for share, hot in pairs}
        balanced = {"balanced": {"share": 0.0, "hot": 0}}
        for routing, about in (balanced | hot).items():
            yield setup.layers("figure4", layer, OURS, routing, "ours", **about)
        worst = next(iter(hot))
        for rival, routing in (
            ("gemm", "balanced"),
            ("hf_a2a", "balanced"),
            ("hf_a2a", worst),
            ("fsdp_gather", "balanced"),
            ("fsdp_gather", worst),
        ):
            yield setup.layers("figure4", layer, (rival,), routing, rival, **(balanced | hot)[routing])


def sweep(setup: Setup) -> Iterator[Cell]:
    """LLEP's figures 6 and 9: one size at a time, against plain EP."""
    base = setup.scale.base
    layers = [(base, "base", 0)]
    for what, values in setup.scale.sweep.items():
        for value in values:
            sizes = {"hidden": value, "intermediate": value} if what == "hidden" else {what: value}
            layers.append((replace(base, name=f"{what} {value}", **sizes), what, value))
    for layer, what, value in layers:
        if what != "base" and _shape(layer) == _shape(base):
            continue
        for routing in ("balanced", f"30:{base.top_k}", f"80:{base.top_k}"):
            yield setup.layers("sweep", layer, OURS, routing, "ours", what=what, value=value)


def relayout(setup: Setup) -> Iterator[Cell]:
    """LAER's comparison: layers of Mixtral-8x7B in a row, loads that wander."""
    for layer, slots, _ in setup.scale.mixtral:
        # Plain EP with even tokens: what all of them aim at.
        yield _relayout_cell(setup, layer, slots, "balanced", "ep")
    for rho, (layer, slots, sigma) in itertools.product(setup.scale.drifts, setup.scale.mixtral):
        for contender in RELAYOUT:
            yield _relayout_cell(setup, layer, slots, f"drift:{rho}:{sigma}", contender)


def _relayout_cell(setup: Setup, layer: Layer, slots: int, routing: str, contender: str) -> Cell:
    shape, ranks = _shape(layer, setup.scale.stack), dist.get_world_size()
    # As published where the ranks are many enough; else the least that leaves a choice, or none for a static layout.
    share = -(-layer.experts // ranks)
    room = max(slots, share if contender == "fsdp_ep" else min(share + 1, layer.experts))

    def run() -> list[dict[str, Any]]:
        settings = {"slots_per_rank": room}
        bench = setup.bench(shape, f"{routing} {contender}", settings=settings, exchanges=True)
        found = bench.measure([contender], routing, 8 if setup.scale.iterations > 1 else 2)
        return [one.as_dict() for one in found]

    about = {"layer": layer.name, "routing": routing, "slots": room, **vars(shape)}
    need = setup.need(layer, (), "balanced") * shape.layers
    return Cell("relayout", f"{layer.name} {routing} {contender}", run, about, need)


def model(setup: Setup) -> Iterator[Cell]:
    """Whole training steps: ``auto`` beside FSDP2 and Transformers' own expert parallelism."""
    changing = f"trace:{setup.trace}" if setup.trace else "drift:0.9"
    for job in setup.scale.models:
        job = replace(job, layers=setup.model_layers or job.layers)
        if setup.profile_path is not None:
            job = replace(job, laer={"profile": str(setup.profile_path)})
        top_k = int(MODELS[job.model]["num_experts_per_tok"])
        for contender in MODEL:
            yield _model_cell(setup, job, contender, ("balanced", f"80:{top_k}", changing))


def _model_cell(setup: Setup, job: Job, contender: str, routings: Sequence[str]) -> Cell:
    def run() -> list[dict[str, Any]]:
        setup.give_up()
        return setup.train(job, contender, routings, setup.device)

    about = {"model": job.model, "layers": job.layers, "rows": job.rows, "length": job.length}
    about |= {"checkpointing": job.checkpointing}
    return Cell("model", f"{job.model} {job.layers} layers {contender}", run, about, _model_need(job))


def _model_need(job: Job) -> float:
    """GiB: 16 bytes per parameter at rest, spread over the ranks, after every rank has made all of it in two."""
    sizes = MODELS[job.model]
    experts = next(sizes[key] for key in ("num_experts", "num_local_experts") if key in sizes)
    intermediate = sizes.get("moe_intermediate_size", sizes.get("intermediate_size"))
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    heads = sizes["num_attention_heads"]
    layer = 3 * experts * hidden * intermediate + 4 * hidden * heads * sizes.get("head_dim", hidden // heads)
    parameters = job.layers * layer + 2 * vocabulary * hidden
    # The logits and their gradient, in float32.
    logits = 2 * 4 * job.rows * job.length * vocabulary
    return float(max(2 * parameters, 16 * parameters / dist.get_world_size()) + logits) / GIB


PARTS: dict[str, Callable[[Setup], Iterator[Cell]]] = {
    "figure4": figure4,
    "sweep": sweep,
    "relayout": relayout,
    "model": model,
}
