"""Histograms of a load test: exact sums, percentiles within the stated precision, and HdrHistogram's own format."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from loadtest.histogram import HIGHEST, PRECISION, Histogram

PERCENTS = (0, 1, 25, 50, 90, 99, 99.9, 100)


def filled(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    return histogram


@given(st.lists(st.integers(0, HIGHEST), min_size=1, max_size=300), st.sampled_from(PERCENTS))
def test_a_percentile_is_exact_within_the_precision(nanoseconds: list[int], percent: float) -> None:
    rank = max(math.ceil(Fraction(str(percent)) * len(nanoseconds) / 100), 1)
    exact = sorted(nanoseconds)[rank - 1] / 1e9
    found = filled([ns / 1e9 for ns in nanoseconds]).percentile_s(percent)
    # A duration in float64 seconds may lose a nanosecond on its way to a whole number of them.
    assert exact - 1.5e-9 <= found <= exact * (1 + PRECISION) + 1.5e-9


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_percentiles_of_many_samples_agree_with_numpy(scale: float) -> None:
    # At no percentage is the rank whole, so numpy's rounding cannot take the next sample.
    samples = np.random.default_rng(0).lognormal(0, 1.5, 20_001) * scale
    histogram = filled(samples.tolist())
    for percent in PERCENTS:
        exact = np.percentile(samples, percent, method="inverted_cdf")
        assert histogram.percentile_s(percent) == pytest.approx(exact, rel=PRECISION, abs=1e-9)


def test_mean_and_variance_are_exact() -> None:
    samples = np.random.default_rng(1).exponential(0.01, 5_000)
    histogram = filled(samples.tolist())
    assert histogram.mean_s == pytest.approx(samples.mean(), rel=1e-6)
    assert histogram.variance_s2 == pytest.approx(samples.var(), rel=1e-6)
    assert histogram.summary()["max"] == pytest.approx(samples.max(), rel=1e-6)
    assert histogram.summary()["min"] == pytest.approx(samples.min(), abs=1e-9)


def test_an_empty_one_has_no_percentiles() -> None:
    assert (Histogram().percentile_s(99), Histogram().mean_s, Histogram().variance_s2) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_other_tools_read_the_encoded_form(seed: int) -> None:
    samples = np.random.default_rng(seed).lognormal(-6, 2, 3_000)
    histogram = filled(samples.tolist())
    theirs = HdrHistogram(1, HIGHEST, 3)
    theirs.decode_and_add(histogram.encoded())
    assert theirs.get_total_count() == histogram.count
    for percent in (50, 90, 99, 99.9):
        assert theirs.get_value_at_percentile(percent) / 1e9 == pytest.approx(histogram.percentile_s(percent))


def test_the_curve_ends_at_the_longest_and_never_falls() -> None:
    histogram = filled(np.random.default_rng(2).exponential(0.01, 5_000).tolist())
    curve = histogram.curve(50)
    assert len(curve) <= 110
    assert [share for share, _ in curve] == sorted((share for share, _ in curve), reverse=True)
    assert curve[-1] == (0, histogram.summary()["max"])
    few = filled([0.001, 0.002, 0.003]).curve()
    assert len(few) == len(set(few)) == 3
