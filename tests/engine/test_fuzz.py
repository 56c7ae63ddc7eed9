"""Random whole models against the unpatched ones: everything that can be combined is combined."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hf_laer.config import FORECASTS, STRATEGIES
from tests.engine import cases_fuzz
from tests.engine.cases_fuzz import PARTS, Example
from tests.models import settings_of

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next")
ROUTINGS = ("random", "model", "skewed", "one", "last", "moving", "ties")


@st.composite
def configs(draw: Any, shards: int, experts: int) -> dict[str, Any]:
    """Settings that go together on so many ranks."""
    kind = settings_of(draw(st.sampled_from((*STRATEGIES, "fsep+llep:whole"))))
    strategy = kind["strategy"]
    sizes = [size for size in (1, 2, 3, 4) if shards % size == 0]
    group = None if "expert_homes" in kind else draw(st.sampled_from([None, *sizes]))
    per_group = 1 if strategy == "fsdp" else group or shards
    share = -(-experts // per_group)
    config = {
        **kind,
        "group_size": group,
        "min_tokens_per_gemm": draw(st.sampled_from((1, 4, 1024))),
        "imbalance_threshold": draw(st.sampled_from((1.0, 1.3))),
        "capacity_factor": draw(st.sampled_from((1.0, 1.5))),
        "recompute": draw(st.sampled_from(("layer", "experts"))),
        "ranks_per_node": draw(st.sampled_from((1, 2, 4))),
        "peer_memory": draw(st.booleans()),
        "prefetch": draw(st.sampled_from((True, True, False))),
        "reshard_after_forward": draw(st.sampled_from((None, True, False, False))),
        "max_rows_per_rank": draw(st.sampled_from((None, None, 1, 7))),
    }
    if strategy.startswith("fsep"):
        config["slots_per_rank"] = draw(st.one_of(st.none(), st.integers(share, experts)))
        config["history"] = draw(st.integers(1, 3))
        config["relayout_interval"] = draw(st.integers(1, 2))
        config["forecast"] = draw(st.sampled_from(FORECASTS))
    return config


@st.composite
def examples(draw: Any) -> Example:
    """Any example; one token attends to itself alone, and has no gradient but rounding there: so there are two."""
    ranks = draw(st.integers(1, 4))
    family = draw(st.sampled_from(FAMILIES))
    # DeepSeek's router picks groups by their two best.
    experts = draw(st.integers(2 if family == "deepseek_v3" else 1, 9))
    replicas = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
    batch = st.one_of(st.tuples(st.integers(1, 3), st.integers(2, 9)), st.just((0, 3)))
    return Example(
        ranks=ranks,
        family=family,
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 4))),
        config=draw(configs(ranks // replicas, experts)),
        routing=draw(st.sampled_from(ROUTINGS)),
        batches=tuple(draw(st.lists(batch, min_size=ranks, max_size=ranks))),
        frozen=tuple(draw(st.lists(st.sampled_from(PARTS), max_size=4, unique=True))),
        frozen_layer=draw(st.sampled_from((None, 0, 1))),
        replicas=replicas,
        bf16=draw(st.booleans()),
        checkpointing=draw(st.booleans()),
        accumulate=draw(st.booleans()),
        evaluate=draw(st.booleans()),
        layers=draw(st.sampled_from((2, 3))),
        twice=draw(st.booleans()),
        change=draw(st.booleans()),
    )


def explore(ranks: Any, count: int, **how: Any) -> None:
    """Tries ``count`` examples; a failure shows the smallest that was found, ready for ``PINNED``."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), **how)
    @given(example=examples())
    def holds(example: Example) -> None:
        ranks(example.ranks).run(cases_fuzz.compare, example=example)

    if how:
        holds()
        return
    number = random.SystemRandom().getrandbits(32)
    try:
        seed(number)(holds)()
    except BaseException as error:
        error.add_note(f"seed({number}) finds this again")
        raise


def test_random_models(ranks) -> None:
    explore(ranks, 15, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_more_random_models(ranks) -> None:
    explore(ranks, 50, derandomize=True)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_other_random_models_each_time(ranks) -> None:
    explore(ranks, 500)


# Corners that a random search seldom meets, and what it finds.
PINNED = (
    Example(
        ranks=4,
        family="qwen3_moe",
        experts=2,
        top_k=1,
        config={"strategy": "fsep+llep", "min_tokens_per_gemm": 1, "recompute": "experts"},
        routing="moving",
        batches=((2, 5), (0, 3), (1, 9), (0, 3)),
        replicas=2,
        checkpointing=True,
        accumulate=True,
        evaluate=True,
    ),
    Example(
        ranks=4,
        family="gpt_oss",
        experts=1,
        top_k=1,
        config={"strategy": "llep", "min_tokens_per_gemm": 1, "imbalance_threshold": 1.0},
        routing="one",
        batches=((1, 2), (0, 3), (3, 9), (0, 3)),
        frozen=("gate_up", "down", "router"),
        bf16=True,
    ),
    Example(
        ranks=3,
        family="deepseek_v3",
        experts=9,
        top_k=4,
        config={"strategy": "fsep", "slots_per_rank": 3, "history": 1},
        routing="last",
        batches=((0, 3), (0, 3), (2, 7)),
        frozen=("dense",),
        frozen_layer=0,
        checkpointing=True,
    ),
)


@pytest.mark.parametrize("example", PINNED, ids=["replicas", "frozen", "empty"])
def test_pinned(ranks, example: Example) -> None:
    ranks(example.ranks).run(cases_fuzz.compare, example=example)
