"""The chat pairs are deterministic, in three domains, and data sets open by path."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import data
import pytest


def test_rows_are_deterministic_and_of_all_domains() -> None:
    rows = data.chat_rows(40, seed=3)
    assert rows == data.chat_rows(40, seed=3)
    assert rows != data.chat_rows(40, seed=4)
    assert Counter(row["domain"] for row in rows) == dict.fromkeys(data.DOMAINS, 40)
    for row in rows:
        prompt, completion = row["prompt"][0], row["completion"][0]
        assert (prompt["role"], completion["role"]) == ("user", "assistant")
        assert 0 < len(prompt["content"]) + len(completion["content"]) <= 900


def test_blocks_follow_one_another() -> None:
    domains = [row["domain"] for row in data.chat_rows(8, block=4)]
    assert domains == [domain for _ in range(2) for domain in data.DOMAINS for _ in range(4)]


def test_code_answers_are_functions() -> None:
    for row in data.domain_rows("code", 50):
        (node,) = ast.parse(row["completion"][0]["content"]).body
        assert isinstance(node, ast.FunctionDef)
        assert ast.get_docstring(node) is None


def test_a_larger_share_of_each_domain_exists() -> None:
    assert all(len(data.domain_rows(domain, 600)) == 600 for domain in data.DOMAINS)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="domain='poetry' is not one of"):
        data.domain_rows("poetry", 1)
    with pytest.raises(ValueError, match="per_domain=5"):
        data.chat_rows(5)


def test_opens_own_rows_files_and_saved_sets(tmp_path: Path) -> None:
    made = data.open_dataset(None, per_domain=32)
    assert set(made) == {"train", "test"}
    assert len(made["train"]) == 90
    made.save_to_disk(tmp_path / "saved")
    assert len(data.open_dataset(str(tmp_path / "saved"))["test"]) == 6
    made["train"].save_to_disk(tmp_path / "one")
    assert len(data.open_dataset(str(tmp_path / "one"))["train"]) == 90
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert data.open_dataset(str(tmp_path / "rows.jsonl"))["train"]["text"] == ["a", "b"]
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(ValueError, match="must end in"):
        data.open_dataset(str(tmp_path / "rows.txt"))
