"""Durations of calls: from the cost model of the mapping, or measured by an earlier run."""

from __future__ import annotations

import math
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from controller.tracking.timeline import EARLIER_FILE, TIMELINE_FILE, read_events
from rlhf.errors import ConfigError

ServiceMethod = tuple[str, str]
"""Name of a service in the config, and Python name of a method."""
LEAST_S = 1e-6
"""Seconds of a call whose duration is not known."""


@dataclass(frozen=True)
class Durations:
    """Durations of the calls of a run.

    Attributes:
        usual: Seconds of the calls of a method in a step, in their order; later calls take as long as the last of them.
            Calls of other methods take `LEAST_S`.
        of_step: The same by number of the step, for steps that were measured.
        spread: Standard deviation of the logarithm of a rank's share: each rank takes exp(spread * z) times as long,
            where z is normal and depends on the seed, the call and the rank alone.
        seed: Seed of the spread.
    """

    usual: Mapping[ServiceMethod, Sequence[float]]
    of_step: Mapping[int, Mapping[ServiceMethod, Sequence[float]]]
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
        key = service, method
        found = self.of_step.get(step, {}).get(key) or self.usual.get(key)
        if not found:
            return LEAST_S
        seconds = found[min(ordinal, len(found) - 1)]
        if not self.spread:
            return seconds
        number = zlib.crc32(repr((self.seed, service, method, step, ordinal, rank)).encode())
        return seconds * math.exp(self.spread * random.Random(number).gauss())


def measured(run_dir: Path, services: Sequence[str]) -> Durations:
    """Returns the durations that the timeline of a run has, from the begin of a call on its first rank to the response
    of its last. A step that was not measured gets the median of the others but the first.

    Args:
        run_dir: Directory of the run.
        services: Names of the services that are simulated.

    Raises:
        ConfigError: The directory has no timeline, or one without calls of these services.
    """
    of_step: dict[int, dict[ServiceMethod, list[float]]] = defaultdict(lambda: defaultdict(list))
    for service, method, step, seconds in _calls(run_dir):
        if service in services:
            of_step[step][service, method].append(seconds)
    steps = {step: dict(calls) for step, calls in of_step.items() if step}
    if not steps:
        raise ConfigError(f"--times {run_dir}: no call of {', '.join(services)} is in its timeline")
    warm = [calls for step, calls in sorted(steps.items()) if step > 1] or list(steps.values())
    usual = {}
    for key in dict.fromkeys(key for calls in warm for key in calls):
        seen = [calls[key] for calls in warm if key in calls]
        usual[key] = [
            median(each[number] for each in seen if len(each) > number)
            for number in range(max(map(len, seen)))
        ]
    return Durations(usual, steps)


def _calls(run_dir: Path) -> list[tuple[str, str, int, float]]:
    """Returns (service, method, step, seconds) of each call of a timeline, in the order of their begin. One whose rows
    were sent in chunks is one call, with the seconds of all."""
    found = []
    try:
        for name in (EARLIER_FILE, TIMELINE_FILE):
            if name == TIMELINE_FILE or (run_dir / name).exists():
                found += _calls_of(read_events(run_dir / name))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--times {run_dir}: not the directory of a run with a timeline: {error}") from None
    calls: list[tuple[str, str, int, float]] = []
    last: dict[tuple[str, str, int], int] = {}
    for _, call, chunk in sorted(found):
        if chunk and call[:3] in last:
            whole = calls[last[call[:3]]]
            calls[last[call[:3]]] = (*call[:3], whole[3] + call[3])
        else:
            last[call[:3]] = len(calls)
            calls.append(call)
    return calls


def _calls_of(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, tuple[str, str, int, float], int]]:
    """Returns the calls of the controller's tracks, each after its begin in microseconds, and before the number of its
    chunk."""
    tracks = {
        (event["pid"], event["tid"]): re.sub(r" \(\d+\)$", "", event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }
    calls = [event for event in events if event["ph"] == "X" and event["cat"] == "controller"]
    return [
        (
            event["ts"],
            (
                tracks[event["pid"], event["tid"]],
                event["name"],
                int(event["args"]["step"]),
                event["dur"] * 1e-6,
            ),
            int(event["args"].get("chunk", 0)),
        )
        for event in calls
    ]
