"""LaerConfig: validated, and the same after YAML and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_laer import LaerConfig

configs = st.builds(
    LaerConfig,
    strategy=st.sampled_from(["ep", "llep", "fsep", "fsep+llep", "fsdp"]),
    expert_homes=st.none(),
    capacity_factor=st.floats(1, 4),
    min_tokens_per_gemm=st.integers(1, 4096),
    imbalance_threshold=st.floats(1, 4),
    slots_per_rank=st.none() | st.integers(1, 64),
    relayout_interval=st.integers(1, 100),
    history=st.integers(1, 100),
    prefetch=st.booleans(),
    reshard_after_forward=st.none() | st.booleans(),
    max_rows_per_rank=st.none() | st.integers(1, 10**6),
    group_size=st.none() | st.integers(1, 64),
    ranks_per_node=st.none() | st.integers(1, 8),
    compute_dtype=st.sampled_from([None, "float32", "bfloat16"]),
    reduce_dtype=st.sampled_from([None, "float32", "bfloat16"]),
    recompute=st.sampled_from(["layer", "experts"]),
)


@given(config=configs, suffix=st.sampled_from([".yaml", ".yml", ".json"]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, config: LaerConfig, suffix: str) -> None:
    path = tmp_path_factory.mktemp("config") / f"laer{suffix}"
    config.to_file(path)
    assert LaerConfig.from_file(path) == config
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("strategy", "eplb"),
        ("expert_homes", "rows"),
        ("expert_homes", 0),
        ("capacity_factor", 0.5),
        ("capacity_factor", float("nan")),
        ("capacity_factor", True),
        ("min_tokens_per_gemm", 0),
        ("min_tokens_per_gemm", 1.5),
        ("imbalance_threshold", 0.9),
        ("imbalance_threshold", "1.3"),
        ("slots_per_rank", 0),
        ("relayout_interval", -1),
        ("history", True),
        ("prefetch", 1),
        ("reshard_after_forward", 0),
        ("max_rows_per_rank", 0),
        ("group_size", 0),
        ("ranks_per_node", 0),
        ("compute_dtype", "fp8"),
        ("reduce_dtype", "bf16"),
        ("recompute", "attention"),
    ],
)
def test_impossible_values_name_the_setting(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting):
        LaerConfig(**{setting: value})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no setting alpha, slots; known: .*slots_per_rank"):
        LaerConfig.from_dict({"alpha": 1.0, "slots": 2})
    with pytest.raises(ValueError, match="mapping"):
        LaerConfig.from_dict(["ep"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("laer.yaml", "strategy: [ep"),
        ("laer.yaml", "!!python/object/apply:os.getcwd []"),
        ("laer.json", "{"),
        ("laer.yaml", "- ep"),
        ("laer.yaml", "strategy: nothing"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        LaerConfig.from_file(path)


def test_slots() -> None:
    assert LaerConfig().slots_for(8, 32) == 2
    assert LaerConfig().slots_for(8, 2) == 5
    assert LaerConfig().slots_for(128, 2) == 80
    assert LaerConfig().slots_for(1, 4) == 1
    assert LaerConfig(slots_per_rank=9).slots_for(8, 2) == 8
    with pytest.raises(ValueError, match="slots_per_rank to 4 or more"):
        LaerConfig(slots_per_rank=3).slots_for(30, 8)


@pytest.mark.parametrize(
    ("strategy", "homes"), [("ep", "sharded"), ("llep", "sharded"), ("fsep", "whole"), ("fsdp", "whole")]
)
def test_homes_that_a_strategy_does_not_have(strategy: str, homes: str) -> None:
    other = {"whole": "sharded", "sharded": "whole"}[homes]
    assert LaerConfig(strategy=strategy, expert_homes=other).homes == other
    with pytest.raises(ValueError, match=f"expert_homes='{homes}' does not go with strategy='{strategy}'"):
        LaerConfig(strategy=strategy, expert_homes=homes)


def test_homes_of_the_union() -> None:
    assert LaerConfig(strategy="fsep+llep").homes is None
    whole = LaerConfig(strategy="fsep+llep", expert_homes="whole")
    assert (whole.homes, whole.with_strategy("fsep").homes, whole.with_strategy("auto").homes) == (
        "whole",
        "sharded",
        None,
    )
    assert whole.with_strategy("auto").with_strategy("fsep+llep") == whole
    with pytest.raises(ValueError, match="group_size=2"):
        LaerConfig(strategy="fsep+llep", expert_homes="whole", group_size=2)
