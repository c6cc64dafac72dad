"""Analysis of measured levels: knee, capacity, queueing theory, and whether the load generator was the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUSTAINED = 0.95
"""Smallest share of the calls due that must be answered for a rate to count as sustained."""
TOLERATED_ERRORS = 0.01
"""Largest share of calls with an error for a rate to count as sustained."""
LAG_FLOOR_S = 0.001
LAG_SHARE = 0.1
BUSY = 0.9


@dataclass(frozen=True)
class Level:
    """One level of a ramp.

    Attributes:
        level: Calls per second offered, or calls at the same time in a closed loop.
        throughput: Calls answered without error, per second.
        latency_s: Mean latency in seconds.
        sustained: Whether the service kept up with the load; see `is_sustained`.
    """

    level: float
    throughput: float
    latency_s: float
    sustained: bool


def knee(levels: Sequence[Level]) -> Level | None:
    """Returns the level with the greatest power, that is throughput divided by mean latency (Kleinrock, "Power and
    deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979); None where no call
    was answered.

    Below it, more load costs little latency; above it, latency grows faster than throughput. For one server with a
    fixed service time and Poisson arrivals it lies at a load of 2 - sqrt(2), or 59 %.
    """
    answered = [level for level in levels if level.latency_s > 0 and level.throughput > 0]
    return max(answered, key=lambda level: level.throughput / level.latency_s, default=None)


def capacity(levels: Sequence[Level]) -> Level | None:
    """Returns the sustained level with the highest throughput; None where no level was sustained."""
    sustained = [level for level in levels if level.sustained]
    return max(sustained, key=lambda level: level.throughput, default=None)


def is_sustained(due: int, answered: int, errors: int, *, closed: bool = False) -> bool:
    """Whether a service kept up with a load: it answered at least `SUSTAINED` of the calls due in the window, with
    errors for at most `TOLERATED_ERRORS` of them.

    Args:
        due: Number of calls due in the window.
        answered: Number of calls answered without error.
        errors: Number of calls that ended with an error.
        closed: Whether the load was a closed loop, in which callers wait for answers, so that one answer is enough.
    """
    kept_up = answered > 0 and (closed or answered >= SUSTAINED * due)
    return due > 0 and kept_up and errors <= TOLERATED_ERRORS * due


def mean_wait_s(rate: float, service_s: float, variance_s2: float = 0.0) -> float:
    """Computes the mean waiting time in the queue of one server with Poisson arrivals (Pollaczek-Khinchine, M/G/1):
    rate E[S^2] / (2 (1 - load)) with load = rate E[S]. Without variance it is that of M/D/1, load S / (2 (1 - load)).

    Args:
        rate: Arrivals per second.
        service_s: Mean service time in seconds.
        variance_s2: Variance of the service time in seconds squared.

    Returns:
        The waiting time in seconds; infinite where the load is 1 or more.
    """
    load = rate * service_s
    return math.inf if load >= 1 else rate * (variance_s2 + service_s**2) / (2 * (1 - load))


def is_generator_limit(lag_s: float, latency_s: float) -> bool:
    """Returns whether the load generator is the limit of a load that was not sustained: the mean delay of its sends
    `lag_s` is more than half of the mean latency `latency_s`, both in seconds."""
    return lag_s > latency_s / 2


def warmup_warnings(warmup_s: float, latency_s: float, window_s: float) -> list[str]:
    """Returns a warning where the measured throughput is too low because the window began before the answers to calls
    of the warm-up arrived; else an empty list.

    Args:
        warmup_s: Duration of the warm-up in seconds.
        latency_s: Median latency in seconds.
        window_s: Duration of the measured window in seconds.
    """
    if latency_s - warmup_s <= (1 - SUSTAINED) * window_s:
        return []
    return [
        f"the median latency is {latency_s:.3g} s and the warm-up {warmup_s:g} s: the measured window began before the "
        "answers to the warm-up calls arrived, so the throughput is too low; increase --warmup"
    ]


def generator_warnings(lag_p99_s: float, latency_p99_s: float, busy: float) -> list[str]:
    """Returns a warning for each sign that the load generator, and not the service, limits the measured figures.

    Args:
        lag_p99_s: 99th percentile of the delay of sends in seconds; latencies include it.
        latency_p99_s: 99th percentile of the latency, from the time at which a call was due, in seconds.
        busy: Share of the time in which the event loop of the load generator was busy, from 0 to 1.
    """
    warnings = []
    if lag_p99_s > max(LAG_FLOOR_S, LAG_SHARE * latency_p99_s):
        warnings.append(
            f"the tester fell behind: the p99 delay of its sends is {lag_p99_s * 1e3:.1f} ms, "
            f"with a p99 latency of {latency_p99_s * 1e3:.1f} ms"
        )
    if busy > BUSY:
        warnings.append(f"the tester was busy {busy:.0%} of the time and may be the limit of the throughput")
    return warnings
