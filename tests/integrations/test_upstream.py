"""The list of monkey-patches fits the installed packages, and says so when it does not."""

from __future__ import annotations

import inspect
import re

import accelerate.accelerator
import pytest
from transformers.trainer_callback import CallbackHandler

from hf_laer.integrations import upstream


@pytest.mark.parametrize("name", list(upstream.PATCHES))
def test_upstream_is_as_expected(name: str) -> None:
    """Fails when Accelerate or Transformers changes what a patch replaces."""
    upstream.check(name)


def test_symmetric_memory_is_as_expected() -> None:
    """Fails when PyTorch changes what ``hf_laer/comm/arena.py`` calls of it, of which no test here runs."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory as Handle

    assert {"size", "dtype", "device"} <= set(inspect.signature(symmetric.empty).parameters)
    assert list(inspect.signature(symmetric.rendezvous).parameters) == ["tensor", "group"]
    assert str(inspect.signature(symmetric.rendezvous).return_annotation).strip("'").endswith("_SymmetricMemory")
    # Compiled methods have no signature but in the first line of what they say of themselves.
    assert re.match(r"get_buffer\(self: \S+, rank: .*, sizes: .*, dtype: ", Handle.get_buffer.__doc__ or "")
    assert re.match(r"barrier\(self: \S+, channel: .*, timeout_ms: ", Handle.barrier.__doc__ or "")


def test_changed_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsdp2_prepare_model(accelerator, model, mesh): ...

    monkeypatch.setattr(accelerate.accelerator, "fsdp2_prepare_model", fsdp2_prepare_model)
    with pytest.raises(RuntimeError, match=r"takes \(accelerator, model, mesh\).*with accelerate 1\.15"):
        upstream.install("prepare", lambda original: None)
    assert accelerate.accelerator.fsdp2_prepare_model is fsdp2_prepare_model


def test_missing_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CallbackHandler, "on_log")
    monkeypatch.setattr(CallbackHandler.__bases__[0], "on_log", None, raising=False)
    monkeypatch.delattr(CallbackHandler.__bases__[0], "on_log")
    with pytest.raises(RuntimeError, match=r"on_log is gone.*transformers"):
        upstream.install("log", lambda original: None)


def test_caller_that_no_longer_looks_it_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.accelerator.Accelerator, "_prepare_fsdp2", lambda self, *args: args)
    with pytest.raises(RuntimeError, match="no longer calls fsdp2_prepare_model"):
        upstream.check("prepare")


def test_installs_once_and_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrapper(original, model):
        calls.append(original)
        return "ours"

    import accelerate.utils.fsdp_utils as utils

    before = utils._find_final_norm
    with upstream.installed("final_norm", wrapper):
        assert utils._find_final_norm(None) == "ours"
        assert upstream.is_installed("final_norm")
    assert utils._find_final_norm is before
    monkeypatch.setattr(utils, "_find_final_norm", before)
    upstream.install("final_norm", wrapper)
    once = utils._find_final_norm
    upstream.install("final_norm", wrapper)
    assert utils._find_final_norm is once
    assert calls == [before]
