"""Ranks that pose as several nodes: parameters, gradients and what crosses a node's border."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import cases_nodes


@pytest.mark.parametrize("size", [3, 4])
def test_exchange(ranks, size: int) -> None:
    """Random slots, whole homes and slices; three ranks are a node of two and one of one."""
    for dim in (0, 1):
        for results in ranks(size).run(cases_nodes.exchange, dim=dim, seeds=range(8)):
            for crossed, least in results:
                assert crossed == least
            assert max(least for _, least in results) > 0


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt_oss", {"strategy": "fsdp"}),
        ("mixtral", {"strategy": "fsep+llep:sharded"}),
        ("qwen3_moe", {"strategy": "fsep", "slots_per_rank": 5}),
        pytest.param("gpt_oss", {"strategy": "fsep+llep:sharded", "prefetch": False}, marks=pytest.mark.long),
        pytest.param("mixtral", {"strategy": "fsep+llep", "group_size": 2}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"strategy": "fsdp", "check_collectives": True}, marks=pytest.mark.long),
    ],
)
def test_equal_to_the_unpatched_model(ranks, family: str, config: dict[str, Any]) -> None:
    for moved in ranks(4).run(cases_nodes.equal_as_nodes, family=family, config=config):
        assert moved["passed"] > 0


@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_a_hot_expert_of_another_node(ranks, reduce_dtype: str | None) -> None:
    """Two experts, one of them to two ranks, to the other node in forward and backward, and their gradients back.

    Not in the last layer's backward: its forward has left them in the slots.
    """
    told = ranks(4).run(cases_nodes.hot_expert_of_another_node, reduce_dtype=reduce_dtype)
    for one in told:
        assert one["spilled"] > 0
        assert one["crossed"] == 2 * one["expert"] * (3 * one["layers"] - 1)
