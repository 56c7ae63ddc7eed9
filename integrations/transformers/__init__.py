"""``patch_model`` and what it knows of Transformers."""

from hf_laer.integrations.transformers.patch import (
    expert_parameters,
    get_engine,
    is_patched,
    patch_model,
    unpatch_model,
)
from hf_laer.integrations.transformers.recording import TraceRecording, record_trace

__all__ = [
    "TraceRecording",
    "expert_parameters",
    "get_engine",
    "is_patched",
    "patch_model",
    "record_trace",
    "unpatch_model",
]
