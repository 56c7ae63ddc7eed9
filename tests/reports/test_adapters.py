"""Reports on adapters, and on what trainers feed the ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integrations import cases_lora
from tests.reports import cases_adapters


def test_b90_adapters_are_the_same_on_all_ranks(ranks, tmp_path) -> None:
    counts = ranks(2).run(cases_adapters.trained_by_trl, folder=str(tmp_path), strategy="llep")
    assert counts[0]["spilled"] > 0


@pytest.mark.parametrize("strategy", ["ep", "fsep"])
def test_b92_adapters_on_experts_take_effect(ranks, strategy: str) -> None:
    ranks(2).run(cases_adapters.takes_effect, strategy=strategy)


@pytest.mark.parametrize(("family", "strategy"), [("qwen3_moe", "llep"), ("gpt_oss", "fsdp")])
def test_b93_files_are_unpatched_peft_s(ranks, tmp_path, family: str, strategy: str) -> None:
    ranks(2).run(cases_lora.saved_and_merged, folder=str(tmp_path), family=family, strategy=strategy)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"parallelism": (2, 2)}, {"group_size": 2}], ids=["replicas", "groups"])
def test_b93_files_from_parts_of_the_ranks(ranks, tmp_path, mesh) -> None:
    laer = {"strategy": "fsep", "slots_per_rank": 4, **mesh}
    ranks(4).run(cases_lora.saved_and_merged, folder=str(tmp_path), family="mixtral", **laer)


@pytest.mark.parametrize("strategy", ["llep", "fsep"])
def test_b94_several_adapters_and_none(ranks, strategy: str) -> None:
    ranks(2).run(cases_adapters.several_adapters, strategy=strategy)


def test_b94_what_peft_refuses_stays_refused() -> None:
    for kind, (theirs, ours) in cases_adapters.refused_as_upstream().items():
        assert ours == theirs, kind


@pytest.mark.parametrize(
    ("world_size", "packing"),
    [(2, True), pytest.param(4, False, marks=pytest.mark.long), pytest.param(4, True, marks=pytest.mark.long)],
)
def test_b95_every_sample_once(ranks, tmp_path, world_size: int, packing: bool) -> None:
    arguments = {"folder": str(tmp_path), "packing": packing}
    fed = ranks(world_size).run(cases_adapters.fed_by_trl, seconds=180, **arguments)
    samples = [sample for batches in fed for batch in batches for sample in batch["samples"]]
    assert Counter(samples) == Counter(range(cases_adapters.SAMPLES))
    for step in zip(*fed, strict=True):
        assert {batch["items"] for batch in step} == {sum(len(batch["labels"]) for batch in step)}
    data = cases_adapters.named_samples()
    masked = zip(data["input_ids"], data["assistant_masks"], strict=True)
    trained = Counter((token, token) for ids, mask in masked for token, on in zip(ids, mask, strict=True) if on)
    assert Counter(pair for batches in fed for batch in batches for pair in batch["labels"]) == trained
