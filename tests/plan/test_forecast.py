"""Forecasts of loads: each by its formula, and what the tuner makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hf_laer.plan.forecast import FORECASTS, HEDGE, HIGHEST_HEDGE, Forecaster, forecast, miss

HISTORIES = st.integers(1, 6).flatmap(
    lambda steps: hnp.arrays(np.int64, (steps, 2, 3), elements=st.integers(0, 10**12)).map(list)
)


def test_each_by_its_formula() -> None:
    history = [np.array([[0, 30]]), np.array([[12, 20]]), np.array([[18, 10]])]
    assert forecast("last", history).tolist() == [[18, 10]]
    assert forecast("mean", history).tolist() == [[10, 20]]
    assert forecast("ema", history).tolist() == [[(0 + 24 + 72) // 7, (30 + 40 + 40) // 7]]
    # The least-squares lines are 1 + 9 t and 30 - 10 t, at t = 3.
    assert forecast("trend", history).tolist() == [[28, 0]]


@settings(deadline=None)
@given(HISTORIES)
def test_the_trend_is_the_least_squares_line(history: list[np.ndarray]) -> None:
    if len(history) < 2:
        return
    flat = np.stack(history).reshape(len(history), -1).astype(float)
    slope, start = np.polyfit(np.arange(len(history)), flat, 1)
    line = np.maximum(start + slope * len(history), 0).reshape(history[0].shape)
    np.testing.assert_allclose(forecast("trend", history), line, rtol=1e-6, atol=2)


@settings(deadline=None)
@given(HISTORIES, st.sampled_from(FORECASTS))
def test_whole_numbers_that_stand_still_where_loads_do(history: list[np.ndarray], name: str) -> None:
    found = forecast(name, history)
    assert found.dtype == np.int64
    assert found.shape == history[0].shape
    assert (found >= 0).all()
    assert (forecast(name, [history[0]] * len(history)) == history[0]).all()


def test_long_histories_stay_in_range() -> None:
    history = [np.full((1, 2), 10**12)] * 200
    assert all((forecast(name, history) == 10**12).all() for name in FORECASTS)


def test_unknown_forecast_and_no_history() -> None:
    with pytest.raises(ValueError, match="last, mean, ema, trend"):
        forecast("oracle", [np.zeros((1, 2), np.int64)])
    with pytest.raises(ValueError, match="0 loads"):
        forecast("last", [])


def test_miss_is_the_share_of_tokens_that_went_elsewhere() -> None:
    assert miss(np.array([[50, 50]]), np.array([[75, 25]])) == 250_000
    assert miss(np.array([[50, 50]]), np.array([[10, 0], [0, 10]])) == 0
    assert miss(np.array([[0, 0]]), np.array([[0, 0]])) == 0


def test_who_misses_much_hedges_more() -> None:
    steady, wild = Forecaster(4), Forecaster(4, "last")
    rng = np.random.default_rng(0)
    for _ in range(30):
        steady.observe(np.array([[100, 300, 200]]))
        wild.observe(rng.integers(0, 100, (1, 3)) ** 3)
    assert steady.hedge == HEDGE
    assert HEDGE < wild.hedge <= HIGHEST_HEDGE
