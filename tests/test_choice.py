"""Which strategy suits a layer: deterministic, and what common sense says at the ends."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_laer import LaerConfig
from hf_laer.choice import (
    Alternative,
    LayerSizes,
    alternatives,
    best,
    choose,
    settled,
    threshold,
    tuned,
)
from hf_laer.config import STRATEGIES
from hf_laer.loads import hot_loads, usual_loads
from hf_laer.plan import chunk_owners, ep, llep, llep_at_home, predict
from hf_laer.profile import shipped_profile
from hf_laer.strategy import make_plan
from tests.plan.test_at_home import first_worth

H200 = shipped_profile("NVIDIA H200")
Q128 = LayerSizes(experts=128, hidden=2048, intermediate=768, top_k=8)
G128 = LayerSizes(experts=128, hidden=2880, intermediate=2880, top_k=4)
SMALL = LayerSizes(experts=8, hidden=2048, intermediate=256, top_k=8)
AUTO = LaerConfig(strategy="auto")

sizes = st.builds(
    LayerSizes,
    experts=st.integers(2, 33),
    hidden=st.sampled_from([64, 2048]),
    intermediate=st.sampled_from([96, 1408]),
    top_k=st.integers(1, 2),
    gated=st.booleans(),
)


@settings(max_examples=12, deadline=None)
@given(layer=sizes, world=st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 4)]), tokens=st.integers(1, 20_000))
def test_alternatives(layer: LayerSizes, world: tuple[int, int], tokens: int) -> None:
    found = alternatives(layer, H200, *world, AUTO, tokens=tokens)
    assert [one.strategy for one in found] == list(STRATEGIES)
    assert found == alternatives(layer, H200, *world, AUTO, tokens=tokens)
    for one in found:
        assert one.seconds >= H200.host("llep" if one.config.homes == "whole" else one.strategy)
        assert min(one.compute, one.tokens, one.weights, one.hidden, one.peak_bytes) >= 0
    by_name = {one.strategy: one for one in found}
    assert by_name["llep"].compute + by_name["llep"].tokens + by_name["llep"].weights <= (
        by_name["ep"].compute + by_name["ep"].tokens + by_name["ep"].weights + 1e-12
    )
    chosen = best(found, world[0])
    assert chosen.seconds <= 1.02 * min(one.seconds for one in found)
    if world[0] == 1:
        assert chosen.strategy == "ep"
        assert chosen.weights == chosen.tokens == 0


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_loads_are_whole(ranks: int) -> None:
    for loads in usual_loads(Q128, ranks, 77):
        assert loads.now.shape == loads.expected.shape == (ranks, 128)
        assert (loads.now.sum(1) == 77 * 8).all()
        assert loads.now.dtype == np.int64
    even, skewed = usual_loads(Q128, ranks, 8192)
    assert even.now.max() == even.now.min() == 512
    assert skewed.now.max() > 2 * skewed.now.mean()
    assert (skewed.now != skewed.expected).any()
    hot = hot_loads(Q128, ranks, 100, 80, 4)
    assert hot.now[:, :4].sum() == 0.8 * hot.now.sum()


def test_small_and_balanced_batches_take_the_plain_path() -> None:
    even = usual_loads(G128, 8, 64)[0]
    (one,) = alternatives(G128, H200, 8, 8, AUTO, tokens=64, loads=[even], strategies=["llep"])
    assert one.weights == one.hidden == 0
    hot = hot_loads(G128, 8, 64, 60, 16)
    (one,) = alternatives(G128, H200, 8, 8, AUTO, tokens=64, loads=[hot], strategies=["llep"])
    assert one.weights == one.hidden == 0


@pytest.mark.parametrize("layer", [Q128, G128])
def test_large_and_imbalanced_batches_spill(layer: LayerSizes) -> None:
    hot = hot_loads(layer, 8, 32768, 80, 16)
    found = alternatives(layer, H200, 8, 8, AUTO, tokens=32768, loads=[hot])
    if layer is G128:  # of small experts, all of them travel sooner than so many tokens
        assert best(found, 8).strategy in ("llep", "fsep+llep")
    by_name = {one.strategy: one.seconds for one in found}
    assert by_name["llep"] < 0.6 * by_name["ep"]


def test_fsdp_is_among_the_choices() -> None:
    """Where experts are small and tokens many, all experts travel sooner than the tokens."""
    assert best(alternatives(SMALL, H200, 2, 2, AUTO, tokens=65536), 2).strategy == "fsdp"


def test_what_does_not_fit_is_not_chosen() -> None:
    found = alternatives(SMALL, H200, 2, 2, AUTO, tokens=65536)
    barred = [dataclasses.replace(one, fits=one.strategy != "fsdp") for one in found]
    assert best(barred, 2).strategy != "fsdp"
    none = [dataclasses.replace(one, fits=False) for one in found]
    assert best(none, 2).peak_bytes == min(one.peak_bytes for one in found)
    alike = [dataclasses.replace(one, peak_bytes=100.0 + at) for at, one in enumerate(none)]
    assert best(alike, 2).strategy == "fsdp", "all need about the same: the fastest"
    tight = dataclasses.replace(H200, memory_bytes=2**30)
    assert not any(one.fits for one in alternatives(G128, tight, 8, 8, AUTO, tokens=8192))
    assert all(one.fits for one in alternatives(G128, H200, 8, 8, AUTO, tokens=8192))


def test_experts_that_stay_take_memory_in_every_layer() -> None:
    """Two experts in each of 32 layers, 20 GiB: they fit one by one beside 84 GiB of homes, not all at once."""
    kept = dataclasses.replace(AUTO, reshard_after_forward=False)
    tight = dataclasses.replace(H200, memory_bytes=120 * 2**30)
    (for_a_while,), (all_along,) = (
        alternatives(M8, tight, 8, 8, config, layers=32, strategies=["fsep"]) for config in (AUTO, kept)
    )
    assert for_a_while.fits
    assert not all_along.fits
    assert all_along.seconds == for_a_while.seconds


def test_layers_of_different_sizes_are_chosen_for_apart() -> None:
    config = LaerConfig(strategy="auto", tokens_per_rank=65536, history=3)
    chosen = choose(config, {"a": SMALL, "b": G128, "c": SMALL}, H200, 2, 2)
    assert chosen["a"] == chosen["c"]
    assert chosen["a"].config == dataclasses.replace(config, strategy="fsdp")
    assert chosen["b"].strategy == "llep"
    alone = choose(config, {"a": SMALL}, H200, 1, 1, leave={"a"})["a"]
    assert alone.strategy == settled(config).strategy == "ep"
    assert alone.reason == "one rank"


# Of docs/benchmarks.md, on two H200: tokens per GPU, and who was faster in whole training steps.
SMALL_QWEN3 = LayerSizes(experts=64, hidden=1024, intermediate=512, top_k=8)
M8 = LayerSizes(experts=8, hidden=4096, intermediate=14336, top_k=2)
MEASURED = {"0.93 B": (SMALL_QWEN3, 4096, "fsdp2"), "Qwen3": (Q128, 8192, "llep"), "Mixtral": (M8, 8192, "llep")}


@pytest.mark.parametrize("model", MEASURED)
def test_measured_models_are_left_to_fsdp2_or_not(model: str) -> None:
    layer, tokens, faster = MEASURED[model]
    config = LaerConfig(tokens_per_rank=tokens)
    chosen = choose(config, {"a": layer, "b": layer}, H200, 2, 2, leave={"a"})
    assert chosen["a"].strategy == faster
    assert (chosen["a"].config is None) == (faster == "fsdp2")
    assert chosen["b"].strategy == "llep", "not to be left"
    assert "fsdp2" not in chosen["b"].reason
    other = "fsdp2" if faster == "llep" else "ep"
    assert re.fullmatch(rf"[\d.]+ ms, {other} [\d.]+", chosen["a"].reason)


# Milliseconds of `fsdp_gather` there, balanced: a layer alone, its experts gathered once, where FSDP2 gathers twice.
GATHERED = {"G128, 32768": (G128, 32768, 73.5), "G128": (G128, 8192, 41.3), "Q128": (Q128, 32768, 30.3)}
GATHERED["M8"] = (M8, 8192, 44.3)


@pytest.mark.parametrize("row", GATHERED)
def test_a_layer_of_fsdp2_takes_what_was_measured(row: str) -> None:
    layer, tokens, measured = GATHERED[row]
    even = usual_loads(layer, 2, tokens)[:1]
    (one,) = alternatives(layer, H200, 2, 2, AUTO, tokens=tokens, loads=even, strategies=["fsdp2"], alone=True)
    assert one.hidden == one.tokens == 0
    assert 1e3 * (one.compute + one.weights * 2 / 3) == pytest.approx(measured, rel=0.04)
    (train,) = alternatives(layer, H200, 2, 2, AUTO, tokens=tokens, loads=even, strategies=["fsdp2"])
    assert train.seconds < one.seconds
    assert train.hidden > 0
    # All experts of two layers, and all gradients of one.
    assert train.peak_bytes > 3 * layer.experts * 3 * layer.hidden * layer.intermediate * 2


def test_what_fsdp2_reduces_in_float32_takes_longer() -> None:
    wide = dataclasses.replace(G128, reduce_bytes=4)
    for strategy in ("fsdp", "fsep", "fsdp2"):
        one, other = (
            alternatives(layer, H200, 2, 2, AUTO, strategies=[strategy], alone=True)[0] for layer in (G128, wide)
        )
        assert other.weights == pytest.approx(one.weights * 4 / 3, rel=1e-2)
        assert other.compute == one.compute


def test_recomputed_layers_cost_more() -> None:
    kinds = {kind: dataclasses.replace(G128, recompute=kind) for kind in ("none", "layer", "experts")}

    def found(kind: str, strategy: str) -> Alternative:
        return alternatives(kinds[kind], H200, 2, 2, AUTO, tokens=8192, strategies=[strategy])[0]

    for strategy in ("llep", "fsdp2"):
        plain, layer, experts = (found(kind, strategy) for kind in kinds)
        assert layer.compute == experts.compute == pytest.approx(plain.compute * 4 / 3)
    ours = [found(kind, "ep").tokens for kind in kinds]
    assert ours[1] == pytest.approx(1.5 * ours[0])
    assert ours[2] == ours[0]
    sent = [found(kind, "fsdp2").hidden + found(kind, "fsdp2").weights for kind in kinds]
    assert sent == pytest.approx([sent[0]] * 3), "they stay unsharded for the backward"
    small = {kind: dataclasses.replace(SMALL_QWEN3, recompute=kind) for kind in kinds}
    hosts = [alternatives(one, H200, 2, 2, AUTO, tokens=64, strategies=["ep", "fsdp2"]) for one in small.values()]
    seconds = [[1e3 * one.seconds for one in row] for row in hosts]
    ours, theirs = (1e3 * H200.host_seconds[name] for name in ("ep", "fsdp2"))
    assert np.allclose(seconds, [[ours, theirs], [1.6 * ours, 1.6 * theirs], [ours, 1.6 * theirs]])


def test_frozen_experts_send_no_gradients() -> None:
    frozen = dataclasses.replace(G128, reduce_bytes=0)
    for strategy in ("fsep", "fsdp2"):
        (one,) = alternatives(frozen, H200, 2, 2, AUTO, tokens=8192, strategies=[strategy], alone=True)
        (other,) = alternatives(G128, H200, 2, 2, AUTO, tokens=8192, strategies=[strategy], alone=True)
        assert one.compute == pytest.approx(other.compute * 2 / 3)
        assert one.weights == pytest.approx(other.weights * 2 / 3)
        assert one.peak_bytes < other.peak_bytes
    # 12 GiB of weights on each of two ranks, or 102 GiB with gradients and moments.
    tight = dataclasses.replace(H200, memory_bytes=80 * 2**30)
    fits = [alternatives(one, tight, 2, 2, AUTO, layers=4, strategies=["ep"])[0].fits for one in (frozen, G128)]
    assert fits == [True, False]


def test_experts_that_run_one_by_one_cost_the_host_each() -> None:
    looped = dataclasses.replace(SMALL_QWEN3, looped=True)
    (one,) = alternatives(looped, H200, 2, 2, AUTO, tokens=4096, strategies=["fsdp2"])
    assert one.seconds == 64 * H200.host("fsdp2")
    assert choose(AUTO, {"a": looped}, H200, 2, 2, expected_tokens=4096, leave={"a"})["a"].strategy == "llep"


def test_a_layer_is_taken_from_fsdp2_only_where_that_is_worth_it() -> None:
    def made(strategy: str, seconds: float, fits: bool = True) -> Alternative:
        return Alternative(strategy, AUTO, seconds, 0, 0, 0, 0, 1e9 * seconds, fits)

    ours = [made("llep", 1.0), made("fsep", 1.01)]
    assert best([*ours, made("fsdp2", 1.029)], 2).strategy == "fsdp2"
    assert best([*ours, made("fsdp2", 1.031)], 2).strategy == "llep"
    assert best([*ours, made("fsdp2", 0.5, fits=False)], 2).strategy == "llep"
    assert best([made("ep", 1.0), made("fsdp2", 0.5)], 1).strategy == "ep"


def test_groups_stay_apart() -> None:
    config = LaerConfig(strategy="auto", group_size=2)
    for one in alternatives(Q128, H200, 4, 2, config, tokens=512):
        whole = alternatives(Q128, H200, 4, 2, AUTO, tokens=512, strategies=[one.strategy])[0]
        if one.strategy == "fsdp":
            assert one.tokens == whole.tokens == 0
        else:
            assert 0 < one.tokens < whole.tokens
            assert one.weights + one.hidden > 0  # every group holds every expert, of which it owns half


UNION = LaerConfig(strategy="fsep+llep", expert_homes="whole")


@pytest.mark.parametrize("layer", [Q128, G128, LayerSizes(8, 4096, 14336, 2), SMALL])
@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_whole_homes_are_never_predicted_slower_than_llep(layer: LayerSizes, ranks: int) -> None:
    """On loads that were foreseen, and on others; nor are settled ones slower than either kind."""
    for tokens in (512, 8192):
        about = layer, H200, ranks, min(ranks, 8)
        by_name = {}
        for name, config in (
            ("llep", LaerConfig(strategy="llep")),
            ("whole", UNION),
            ("sharded", dataclasses.replace(UNION, expert_homes="sharded")),
            ("settled", dataclasses.replace(UNION, expert_homes=None)),
        ):
            (one,) = alternatives(*about, config, tokens=tokens, strategies=[config.strategy])
            by_name[name] = one
        assert by_name["whole"].seconds <= by_name["llep"].seconds * (1 + 1e-9)
        least = min(by_name["whole"].seconds, by_name["sharded"].seconds)
        assert by_name["settled"].seconds <= 1.02 * least
        assert by_name["settled"].config.homes in ("whole", "sharded")


def test_where_experts_live_is_settled_when_layers_are_chosen() -> None:
    config = LaerConfig(strategy="fsep+llep")
    assert config.homes is None
    chosen = choose(config, {"a": LayerSizes(8, 4096, 14336, 2)}, H200, 2, 2)["a"].config
    assert chosen == dataclasses.replace(config, expert_homes="whole"), "large experts, few ranks"
    grouped = dataclasses.replace(config, group_size=2)
    assert choose(grouped, {"a": Q128}, H200, 4, 4)["a"].config.homes == "sharded"
    auto = dataclasses.replace(AUTO, expert_homes="sharded")
    found = {one.strategy: one.config for one in alternatives(Q128, H200, 2, 2, auto)}
    assert {name: one.homes for name, one in found.items()} == {
        "ep": "whole",
        "llep": "whole",
        "fsep": "sharded",
        "fsep+llep": "sharded",
        "fsdp": "sharded",
    }
    assert found["llep"].expert_homes is None
    assert settled(config).homes == "whole"


def test_the_threshold_in_figures() -> None:
    large = threshold(G128, H200, 8, 8, AUTO, 32768)
    small = threshold(G128, H200, 8, 8, AUTO, 2048)
    assert large is not None
    assert 1.0 < large < 1.5
    assert small is None or small > large
    assert threshold(G128, H200, 8, 8, AUTO, 16) is None


def test_settings_are_tuned_where_something_is_won() -> None:
    def predicted(config: LaerConfig) -> Alternative:
        seconds = 10 - (config.slots_per_rank or 0) + abs(config.min_tokens_per_gemm - 512) / 1024
        return Alternative(config.strategy, config, seconds, 0, 0, 0, 0, 0)

    got = tuned(LaerConfig(strategy="fsep+llep"), predicted, (2, 3))
    assert (got.slots_per_rank, got.min_tokens_per_gemm, got.capacity_factor) == (3, 512, 1.0)
    assert tuned(LaerConfig(strategy="ep"), predicted, (2, 3)) == LaerConfig(strategy="ep")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_spilled_is_predicted_to_pay(data: st.DataObject) -> None:
    ranks, layer = data.draw(st.sampled_from([2, 3, 8])), data.draw(st.sampled_from([Q128, G128]))
    scale = data.draw(st.sampled_from([1, 30, 3000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    loads = rng.integers(0, scale + 1, (ranks, 9)) * rng.integers(0, 6, 9)
    cost, owners = layer.cost(H200.of_ranks(ranks, ranks), 0), chunk_owners(9, ranks)
    config = LaerConfig(strategy="llep", min_tokens_per_gemm=data.draw(st.sampled_from([1, 256])))
    got = make_plan(config, loads, None, ranks, cost)
    assert got.digest() == make_plan(config, loads.copy(), None, ranks, cost).digest()
    spill = {"min_tokens_per_gemm": config.min_tokens_per_gemm, "ranks_per_node": ranks}
    plans = [ep(loads, owners), llep(loads, owners, imbalance_threshold=1.0, **spill)]
    plans += [llep_at_home(loads, owners, **spill)] if plans[1].spilled else []
    predicted = [predict(plan, loads, cost, home="whole", owners=owners).predicted for plan in plans]
    seconds = [one.seconds for one in predicted if one is not None]
    assert got.digest() == first_worth(plans, seconds).digest()


@pytest.mark.parametrize("strategy", ["llep", "fsep+llep"])
def test_a_threshold_that_is_given_keeps_its_published_meaning(strategy: str) -> None:
    """Spilling is on above it, whatever is predicted; and without figures of a machine."""
    loads = np.full((4, 8), 3)
    loads[:, 0] = 12
    cost = G128.cost(H200.of_ranks(4, 4), 0)
    placement = None
    if strategy == "fsep+llep":
        from hf_laer.plan import initial_placement

        placement = initial_placement(8, 4, 2)
        loads = np.zeros((4, 8), np.int64)
        loads[:, :2] = 40
    config = LaerConfig(strategy=strategy, min_tokens_per_gemm=1)
    given = dataclasses.replace(config, imbalance_threshold=1.2)
    assert make_plan(config, loads, placement, 4, cost).spilled == 0
    assert make_plan(given, loads, placement, 4, cost).spilled > 0
    assert make_plan(config, loads, placement, 4).spilled > 0
    if strategy == "llep":
        high = dataclasses.replace(config, imbalance_threshold=3.0)
        assert make_plan(high, loads, placement, 4, cost).spilled == 0
