"""Measurements of the engine, its rivals beside it in the same run."""
