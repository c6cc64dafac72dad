"""Measures how long devices are in use, and how long calls on disjoint devices run side by side."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceUse:
    """Use of the devices of a run over a span of time.

    Attributes:
        seconds: Length of the span.
        together_s: Seconds in which calls ran on two disjoint sets of devices or more.
        busy_s: Seconds in which a device had a call, summed over devices.
        devices: Number of devices.
    """

    seconds: float
    together_s: float
    busy_s: float
    devices: int

    def metrics(self) -> dict[str, float]:
        """Returns metrics `time/overlap_share`, the share of the span in which calls on disjoint devices ran side by
        side, and `time/idle_share`, the mean share in which a device had no call. None for an empty span."""
        if self.seconds <= 0 or not self.devices:
            return {}
        idle = 1 - self.busy_s / (self.seconds * self.devices)
        return {"time/overlap_share": self.together_s / self.seconds, "time/idle_share": max(idle, 0.0)}


class DeviceMeter:
    """Follows the calls on devices. A device is in use from when a call on it is sent until it ends. Thread-safe.

    Args:
        now: Function that returns the time, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._devices: frozenset[str] = frozenset()
        self._running: Counter[frozenset[str]] = Counter()
        self._began_s = self._noted_s = now()
        self._together_s = self._busy_s = 0.0

    def add(self, devices: frozenset[str]) -> None:
        """Adds devices that calls may run on."""
        with self._lock:
            self._devices |= devices

    def begin(self, devices: frozenset[str]) -> None:
        """Notes that a call on these devices has been sent."""
        with self._lock:
            self._note()
            self._running[devices] += 1

    def end(self, devices: frozenset[str]) -> None:
        """Notes that a call on these devices, whose begin was noted, has ended."""
        with self._lock:
            self._note()
            self._running[devices] -= 1
            if not self._running[devices]:
                del self._running[devices]

    def take(self) -> DeviceUse:
        """Returns the use since the last call of `take`, or since the meter was made."""
        with self._lock:
            self._note()
            use = DeviceUse(self._noted_s - self._began_s, self._together_s, self._busy_s, len(self._devices))
            self._began_s, self._together_s, self._busy_s = self._noted_s, 0.0, 0.0
            return use

    def _note(self) -> None:
        """Adds the time since the last change to the sums."""
        now = self._now()
        seconds, self._noted_s = max(now - self._noted_s, 0.0), now
        sets = list(self._running)
        self._busy_s += seconds * len(frozenset[str]().union(*sets))
        if any(not one & other for place, one in enumerate(sets) for other in sets[:place]):
            self._together_s += seconds
