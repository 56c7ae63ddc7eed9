"""AdamW steps, patched, equal those under unpatched FSDP2: TRL's trainer and a plain Accelerate loop.

Ten by either with each strategy; five or fewer where something beside is tried.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.covering import later
from tests.integrations import cases, cases_trl

ONE_IS_LONG = ("llep", *later("fsep"))
MOVES = {"llep": "spilled", "fsep": "moved", "fsep+llep:sharded": "spilled", "fsep+llep:whole": "spilled"}


def check(ranks, case: Any, strategy: str, **arguments: Any) -> None:
    """Runs a case; all ranks count the same, and something moved where the strategy moves anything."""
    counts = ranks(2).run(case, strategy=strategy, **arguments)
    assert all(count == counts[0] for count in counts)
    steps = arguments.get("steps", arguments.get("max_steps", 10))
    assert counts[0]["records"] == 4 * steps, "two layers, two micro-batches a step"
    if strategy in MOVES:
        assert counts[0][MOVES[strategy]] > 0, "nothing moved: the test proved nothing"


@pytest.mark.parametrize("strategy", ["llep", "fsep+llep:whole", *later("ep", "fsep", "fsep+llep:sharded", "fsdp")])
def test_trl(ranks, tmp_path, strategy: str) -> None:
    check(ranks, cases_trl.trains, strategy, folder=str(tmp_path), family="qwen3_moe")


@pytest.mark.parametrize("family", [*later("mixtral"), "gpt_oss"])
def test_trl_families(ranks, tmp_path, family: str) -> None:
    check(ranks, cases_trl.trains, "fsep", folder=str(tmp_path), family=family, max_steps=5)


@pytest.mark.parametrize(
    ("strategy", "selective"), [("llep", False), ("fsep", True), *later(("llep", True), ("fsep", False))]
)
def test_trl_checkpointing(ranks, tmp_path, strategy: str, selective: bool) -> None:
    kwargs = {"selective": True} if selective else None
    on = {"max_steps": 5, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    check(ranks, cases_trl.trains, strategy, folder=str(tmp_path), family="qwen3_moe", **on)


@pytest.mark.parametrize("strategy", ["fsep", *later("ep", "llep", "fsep+llep:whole", "fsep+llep:sharded", "fsdp")])
def test_loop(ranks, strategy: str) -> None:
    check(ranks, cases.loop, strategy, family="qwen3_moe")


@pytest.mark.parametrize("recompute", [*later("layer"), "experts"])
def test_accelerate_checkpointing(ranks, recompute: str) -> None:
    check(ranks, cases.checkpointed_by_accelerate, "fsep", steps=5, recompute=recompute)


def test_forward_cut_short(ranks) -> None:
    check(ranks, cases.forward_cut_short, "fsep", steps=5)


@pytest.mark.parametrize("how", [*later("foreach"), "fused"])
def test_optimizers(ranks, how: str) -> None:
    check(ranks, cases.loop, "fsep", family="qwen3_moe", optimizer={how: True}, steps=5)


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_experts_stay_where_fsdp_does_not_reshard(ranks, strategy: str) -> None:
    check(ranks, cases.loop, strategy, family="qwen3_moe", plugin={"reshard_after_forward": False}, steps=5)


def test_cpu_offload_on_cpus(ranks) -> None:
    plugin = {"cpu_offload": CPUOffloadPolicy(pin_memory=False)}  # pinning needs a GPU
    check(ranks, cases.loop, "fsep", family="qwen3_moe", plugin=plugin, steps=5)


def test_evaluation_during_training(ranks, tmp_path) -> None:
    check(ranks, cases_trl.evaluates, "fsep", folder=str(tmp_path), max_steps=4)


@pytest.mark.parametrize("tied", [*later(False), True])
def test_head_in_root_unit(ranks, tmp_path, tied: bool) -> None:
    counts = ranks(2).run(cases_trl.head_in_root_unit, folder=str(tmp_path), tied=tied)
    assert counts[0]["spilled"] > 0


@pytest.mark.parametrize("strategy", ONE_IS_LONG)
def test_lora_on_attention(ranks, tmp_path, strategy: str) -> None:
    check(ranks, cases_trl.trains_lora, strategy, folder=str(tmp_path), max_steps=5)


@pytest.mark.parametrize("strategy", ONE_IS_LONG)
def test_ram_efficient_loading(ranks, tmp_path, strategy: str) -> None:
    check(ranks, cases.loaded_on_one_rank, strategy, folder=str(tmp_path), steps=5)


@pytest.mark.parametrize("strategy", ONE_IS_LONG)
def test_bf16(ranks, strategy: str) -> None:
    check(ranks, cases.in_bf16, strategy, steps=5)


@pytest.mark.parametrize("strategy", [*later("llep"), "fsep"])
def test_hsdp(ranks, strategy: str) -> None:
    ranks(4).run(cases.hsdp, strategy=strategy)


@pytest.mark.parametrize("strategy", ONE_IS_LONG)
def test_sharded_before_prepare(ranks, strategy: str) -> None:
    check(ranks, cases.sharded_before_prepare, strategy, steps=5)


def test_failed_preparation_leaves_the_experts(ranks) -> None:
    ranks(2).run(cases.preparation_fails)


def test_numbers_reach_reporters(ranks, tmp_path) -> None:
    one, other = ranks(2).run(cases_trl.reported, folder=str(tmp_path))
    assert one == other, "the same on all ranks"
