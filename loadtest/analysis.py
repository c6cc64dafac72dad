"""Analysis of measured levels: knee, capacity, queueing theory, and whether the load generator was the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUSTAINED = 0.95
"""Share of the calls due that has to be answered for a rate to count as sustained."""
TOLERATED_ERRORS = 0.01
"""Share of errors up to which it still does."""
LAG_FLOOR_S = 0.001
LAG_SHARE = 0.1
BUSY = 0.9


@dataclass(frozen=True)
class Level:
    """One level of a ramp.

    Attributes:
        level: Calls per second offered, or calls at the same time in a closed loop.
        throughput: Calls answered without error, per second.
        latency_s: Mean latency.
        sustained: Whether the service kept up with it.
    """

    level: float
    throughput: float
    latency_s: float
    sustained: bool


def knee(levels: Sequence[Level]) -> Level | None:
    """The level of the greatest power: throughput over mean latency (Kleinrock, "Power and deterministic rules of
    thumb for probabilistic problems in computer communications", ICC 1979).

    Below it, more load costs little latency; above it, latency grows faster than throughput. For one server with a
    fixed service time and Poisson arrivals it lies at a load of 2 - sqrt(2), or 59 %.
    """
    answered = [level for level in levels if level.latency_s > 0 and level.throughput > 0]
    return max(answered, key=lambda level: level.throughput / level.latency_s, default=None)


def capacity(levels: Sequence[Level]) -> Level | None:
    """The level with the highest throughput of those the service kept up with."""
    sustained = [level for level in levels if level.sustained]
    return max(sustained, key=lambda level: level.throughput, default=None)


def is_sustained(due: int, answered: int, errors: int, *, closed: bool = False) -> bool:
    """Whether a service kept up: it answered nearly all calls due in a window, nearly without error. A closed loop
    waits for answers, so there any answer is enough, nearly without error."""
    kept_up = answered > 0 and (closed or answered >= SUSTAINED * due)
    return due > 0 and kept_up and errors <= TOLERATED_ERRORS * due


def mean_wait_s(rate: float, service_s: float, variance_s2: float = 0.0) -> float:
    """Mean time in the queue of one server with Poisson arrivals (Pollaczek-Khinchine, M/G/1):
    rate E[S^2] / (2 (1 - load)). With no variance it is M/D/1's load S / (2 (1 - load)).

    Args:
        rate: Arrivals per second.
        service_s: Mean service time S.
        variance_s2: Variance of the service time.

    Returns:
        Seconds; infinite where the server cannot keep up.
    """
    load = rate * service_s
    return math.inf if load >= 1 else rate * (variance_s2 + service_s**2) / (2 * (1 - load))


def is_testers_limit(lag_s: float, latency_s: float) -> bool:
    """Whether the tester limits a load that was not kept up with: the lag of its sends is most of the mean latency."""
    return lag_s > latency_s / 2


def warmup_warnings(warmup_s: float, latency_s: float, window_s: float) -> list[str]:
    """Warning that the throughput is too low: the window began before the answers to the warm-up arrived.

    Args:
        latency_s: Median latency.
    """
    if latency_s - warmup_s <= (1 - SUSTAINED) * window_s:
        return []
    return [
        f"half of the calls took {latency_s:.3g} s or more, and the warm-up {warmup_s:g} s: the throughput lacks the "
        "answers that were still to come when the window began; lengthen --warmup"
    ]


def generator_warnings(lag_p99_s: float, latency_p99_s: float, busy: float) -> list[str]:
    """Reasons not to take a figure for the service's own.

    Args:
        lag_p99_s: By how much sends were late, 99th percentile; latencies contain it.
        latency_p99_s: Latency from the intended time of sending, 99th percentile.
        busy: Share of the time in which the tester's event loop computed.
    """
    warnings = []
    if lag_p99_s > max(LAG_FLOOR_S, LAG_SHARE * latency_p99_s):
        warnings.append(
            f"the tester fell behind: 1 % of the sends were over {lag_p99_s * 1e3:.1f} ms late, "
            f"of a p99 of {latency_p99_s * 1e3:.1f} ms"
        )
    if busy > BUSY:
        warnings.append(f"the tester was busy {busy:.0%} of the time: the limit may be its own")
    return warnings
