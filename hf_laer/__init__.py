"""hf_laer: fine-tune Mixture-of-Experts models without waiting for the hottest expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_laer.config import LaerConfig
    from hf_laer.integrations.transformers import (
        expert_parameters,
        is_patched,
        patch_model,
        record_trace,
        unpatch_model,
    )

__version__ = "0.1.0"
__all__ = ["LaerConfig", "expert_parameters", "is_patched", "patch_model", "record_trace", "unpatch_model"]

_HOMES = {"LaerConfig": "hf_laer.config"}


def __getattr__(name: str) -> Any:
    """Imports lazily, so that ``import hf_laer.plan`` needs neither torch nor Transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "hf_laer.integrations.transformers")), name)
