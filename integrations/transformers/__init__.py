"""``patch_model`` and what it knows of Transformers."""

from hf_laer.integrations.transformers.patch import (
    expert_parameters,
    get_engine,
    is_patched,
    patch_model,
    unpatch_model,
)

__all__ = ["expert_parameters", "get_engine", "is_patched", "patch_model", "unpatch_model"]
