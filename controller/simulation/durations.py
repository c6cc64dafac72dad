"""Durations of calls: from the cost model of the mapping, or measured by an earlier run."""

from __future__ import annotations

import math
import random
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from controller.tracking.timeline import EARLIER_FILE, TIMELINE_FILE, read_events, thread_of
from rlhf.errors import ConfigError

ServiceMethod = tuple[str, str]
"""Name of a service in the config, and Python name of a method."""
LEAST_S = 1e-6
"""Seconds of a call whose duration is not known."""


@dataclass(frozen=True)
class CallTimes:
    """A time in seconds of each call of a run.

    Attributes:
        usual: Times of the calls of a method in a step, in their order; later calls take the last of them.
        of_step: The same by number of the step, for steps that were measured.
    """

    usual: Mapping[ServiceMethod, Sequence[float]] = field(default_factory=dict)
    of_step: Mapping[int, Mapping[ServiceMethod, Sequence[float]]] = field(default_factory=dict)

    def find(self, service: str, method: str, step: int, ordinal: int) -> float | None:
        """Returns the time of call number `ordinal`, from 0, of a method in a step; None where it is not known."""
        key = service, method
        found = self.of_step.get(step, {}).get(key) or self.usual.get(key)
        return found[min(ordinal, len(found) - 1)] if found else None


@dataclass(frozen=True)
class Durations:
    """Durations of the calls of a run.

    Attributes:
        calls: Seconds of each call. Calls of other methods take `LEAST_S`.
        pauses: Seconds from the end of another call, on which a call can begin, to its start: the work of the
            controller. Calls of other methods begin at once.
        spread: Standard deviation of the logarithm of a rank's share: each rank takes exp(spread * z) times as long,
            where z is normal and depends on the seed, the call and the rank alone.
        seed: Seed of the spread.
    """

    calls: CallTimes
    pauses: CallTimes = CallTimes()
    spread: float = 0.0
    seed: int = 0

    def seconds(self, service: str, method: str, step: int, ordinal: int, rank: int) -> float:
        """Returns the seconds that a rank takes for a call.

        Args:
            service, method: As in `ServiceMethod`.
            step: Number of the step.
            ordinal: Number of the call of this method in the step, from 0.
            rank: The rank.
        """
        seconds = self.calls.find(service, method, step, ordinal)
        if not seconds:
            return LEAST_S
        if not self.spread:
            return seconds
        number = zlib.crc32(repr((self.seed, service, method, step, ordinal, rank)).encode())
        return seconds * math.exp(self.spread * random.Random(number).gauss())


@dataclass(frozen=True, order=True)
class TimedCall:
    """A call of a timeline, or one of several chunks of its rows, by number. Times are in seconds since its start."""

    start: float
    end: float
    service: str
    method: str
    step: int
    chunk: int = 0


def measured(run_dir: Path, services: Sequence[str]) -> Durations:
    """Returns the durations that the timeline of a run has, from the start of a call on its first rank to the response
    of its last, and the pauses before calls: from the last end of another call. A step that was not measured gets the
    median of the others but the first.

    Args:
        run_dir: Directory of the run.
        services: Names of the services that are simulated.

    Raises:
        ConfigError: The directory has no timeline, or one without calls of these services.
    """
    calls = timed_calls(run_dir)
    seconds, pauses = [], []
    for call, pause in zip(calls, _pauses(calls), strict=True):
        if call.service in services and call.step:
            seconds.append((call, call.end - call.start))
            pauses += [] if call.chunk else [(call, pause)]
    if not seconds:
        raise ConfigError(f"--times {run_dir}: no call of {', '.join(services)} is in its timeline")
    return Durations(_call_times(seconds), _call_times(pauses))


def _pauses(calls: Sequence[TimedCall]) -> list[float]:
    """Returns for each call the seconds between the latest earlier end of a call and its start; 0 if no call has ended
    before it. Every call begins when a call ends that has produced its rows or occupied its devices."""
    ends = sorted(call.end for call in calls)
    ended = [bisect_right(ends, call.start) for call in calls]
    return [
        call.start - ends[number - 1] if number else 0.0 for call, number in zip(calls, ended, strict=True)
    ]


def _call_times(times: Iterable[tuple[TimedCall, float]]) -> CallTimes:
    """Returns the times of calls by step, of chunks together; the usual ones are medians over the steps but the
    first."""
    of_step: dict[int, dict[ServiceMethod, list[float]]] = defaultdict(lambda: defaultdict(list))
    for call, seconds in times:
        found = of_step[call.step][call.service, call.method]
        if call.chunk and found:
            found[-1] += seconds
        else:
            found.append(seconds)
    steps = {step: dict(found) for step, found in of_step.items()}
    warm = [found for step, found in sorted(steps.items()) if step > 1] or list(steps.values())
    usual = {}
    for key in dict.fromkeys(key for found in warm for key in found):
        seen = [found[key] for found in warm if key in found]
        usual[key] = [
            median(each[number] for each in seen if len(each) > number)
            for number in range(max(map(len, seen)))
        ]
    return CallTimes(usual, steps)


def timed_calls(run_dir: Path) -> list[TimedCall]:
    """Returns the calls of the timeline of a run, in the order in which they began. Raises ConfigError where it has
    none."""
    found = []
    try:
        for name in (EARLIER_FILE, TIMELINE_FILE):
            if name == TIMELINE_FILE or (run_dir / name).exists():
                found += _calls_of(read_events(run_dir / name))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--times {run_dir}: not the directory of a run with a timeline: {error}") from None
    return sorted(found)


def _calls_of(events: Sequence[Mapping[str, Any]]) -> Iterator[TimedCall]:
    """Yields the calls of the controller's tracks."""
    tracks = {
        (event["pid"], event["tid"]): thread_of(event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }
    for event in events:
        if event["ph"] == "X" and event["cat"] == "controller":
            service, step = tracks[event["pid"], event["tid"]], int(event["args"]["step"])
            start, end = event["ts"], event["ts"] + event["dur"]
            chunk = int(event["args"].get("chunk", 0))
            yield TimedCall(start * 1e-6, end * 1e-6, service, event["name"], step, chunk)
