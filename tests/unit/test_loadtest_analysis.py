"""Queueing theory, knee and capacity, against simulated queues."""

import itertools
import math

import numpy as np
import pytest

from loadtest.analysis import (
    Level,
    capacity,
    generator_warnings,
    is_generator_limit,
    is_sustained,
    knee,
    mean_wait_s,
    warmup_warnings,
)
from loadtest.schedule import poisson


def simulated_wait_s(rate: float, services: np.ndarray) -> float:
    """Mean wait of one server, call by call (Lindley's recursion)."""
    free_at = total = 0.0
    for arrival, service in zip(
        itertools.islice(poisson(rate, 11), len(services)), services.tolist(), strict=True
    ):
        begins = max(arrival, free_at)
        total += begins - arrival
        free_at = begins + service
    return total / len(services)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_a_fixed_service_time_waits_as_m_d_1_says(load: float) -> None:
    expected = mean_wait_s(load / 0.01, 0.01)
    assert expected == pytest.approx(0.01 * load / (2 * (1 - load)))
    assert simulated_wait_s(load / 0.01, np.full(200_000, 0.01)) == pytest.approx(expected, rel=0.03)


def test_a_varying_service_time_waits_as_m_g_1_says() -> None:
    services = np.random.default_rng(0).gamma(2.0, 0.005, 300_000)
    expected = mean_wait_s(50.0, float(services.mean()), float(services.var()))
    assert simulated_wait_s(50.0, services) == pytest.approx(expected, rel=0.04)


def test_a_server_that_cannot_keep_up_waits_for_ever() -> None:
    assert mean_wait_s(100.0, 0.01) == math.inf


def level(load: float, sustained: bool = True) -> Level:
    return Level(load * 100, load * 100, 0.01 + mean_wait_s(load * 100, 0.01), sustained)


def test_the_knee_of_m_d_1_is_at_a_load_of_two_minus_root_two() -> None:
    found = knee([level(load) for load in np.linspace(0.01, 0.99, 99).tolist()])
    assert found is not None
    assert found.level / 100 == pytest.approx(2 - math.sqrt(2), abs=0.006)


def test_where_nothing_was_answered_there_is_no_knee() -> None:
    assert knee([Level(10, 0.0, 0.0, False)]) is None
    assert knee([]) is None


def test_capacity_is_the_most_that_was_kept_up_with() -> None:
    levels = [level(0.2), level(0.9), Level(200, 99.0, 3.0, sustained=False)]
    assert capacity(levels) == levels[1]
    assert capacity(levels[2:]) is None


@pytest.mark.parametrize(
    ("due", "answered", "errors", "kept_up"),
    [
        (1000, 1000, 0, True),
        (1000, 951, 0, True),
        (1000, 940, 0, False),
        (1000, 1000, 11, False),
        (0, 0, 0, False),
    ],
)
def test_sustained_is_answering_what_is_due(due: int, answered: int, errors: int, kept_up: bool) -> None:
    assert is_sustained(due, answered, errors) is kept_up


@pytest.mark.parametrize(
    ("due", "answered", "errors", "kept_up"),
    [(100, 10, 0, True), (100, 99, 1, True), (100, 98, 2, False), (100, 0, 100, False), (100, 0, 0, False)],
)
def test_a_closed_loop_is_sustained_where_calls_are_answered_without_error(
    due: int, answered: int, errors: int, kept_up: bool
) -> None:
    assert is_sustained(due, answered, errors, closed=True) is kept_up


def test_a_tester_that_is_late_or_busy_says_so() -> None:
    assert generator_warnings(0.0005, 0.001, 0.2) == []
    assert generator_warnings(0.005, 0.2, 0.2) == []
    assert "fell behind" in generator_warnings(0.03, 0.2, 0.2)[0]
    assert "busy 97%" in generator_warnings(0.0, 0.2, 0.97)[0]


def test_a_warm_up_too_short_for_the_latency_says_so() -> None:
    assert warmup_warnings(1.0, 1.4, 10.0) == []
    assert warmup_warnings(0.0, 0.001, 1.0) == []
    assert "increase --warmup" in warmup_warnings(0.5, 1.1, 10.0)[0]


def test_a_latency_that_is_mostly_lag_is_the_testers() -> None:
    assert is_generator_limit(0.6, 1.0)
    assert not is_generator_limit(0.1, 1.0)
