"""A cluster on paper: planners replayed over recorded or made-up loads, for any number of ranks."""

from .drift import PRESET_SLOTS, PRESETS, Drift
from .methods import METHODS, Method, Setting, get_method
from .replay import METRICS, Replay, replay
from .trace import Trace, TraceWriter, load_trace, trace_from_csv

__all__ = [
    "METHODS",
    "METRICS",
    "PRESETS",
    "PRESET_SLOTS",
    "Drift",
    "Method",
    "Replay",
    "Setting",
    "Trace",
    "TraceWriter",
    "get_method",
    "load_trace",
    "replay",
    "trace_from_csv",
]
