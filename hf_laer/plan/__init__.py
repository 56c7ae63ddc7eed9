"""Planners: pure functions from loads to plans. Numpy in, frozen dataclasses out; no torch."""
