"""When the calls of a load test are due."""

import itertools

import numpy as np
import pytest

from loadtest.schedule import arrivals, ramp
from rlhf.errors import ConfigError


def first(count: int, *args: object) -> np.ndarray:
    return np.fromiter(itertools.islice(arrivals(*args), count), float)  # type: ignore[arg-type]


def test_constant_arrivals_are_equally_apart_and_do_not_drift() -> None:
    assert first(100_001, "constant", 300.0, 0)[-1] == pytest.approx(100_000 / 300.0, abs=1e-9)


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(first(100_001, "poisson", 250.0, 7))
    assert gaps.mean() == pytest.approx(1 / 250, rel=0.01)
    assert gaps.std() == pytest.approx(1 / 250, rel=0.02)
    # Of an exponential, e^-2 are beyond twice the mean.
    assert np.mean(gaps > 2 / 250) == pytest.approx(np.exp(-2), rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.01


def test_the_seed_decides() -> None:
    assert np.array_equal(first(50, "poisson", 10.0, 3), first(50, "poisson", 10.0, 3))
    assert not np.array_equal(first(50, "poisson", 10.0, 3), first(50, "poisson", 10.0, 4))


def test_a_ramp_goes_up_by_a_factor() -> None:
    assert ramp("10:160:5") == [10, 20, 40, 80, 160]


@pytest.mark.parametrize("text", ["", "10:20", "10:20:x", "20:10:3", "0:10:3", "1:2:1", "1:inf:3", "nan:2:3"])
def test_what_is_no_ramp_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ramp"):
        ramp(text)
