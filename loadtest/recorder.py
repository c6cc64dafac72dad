"""Records the calls of one step of a load test, in memory that does not grow with their number."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from loadtest.caller import OK, ROW_ERROR, Reply
from loadtest.histogram import Histogram

UNFINISHED = "UNFINISHED"
"""Code of a call that had no answer when the wait for answers ended."""
TIMED = (OK, ROW_ERROR, UNFINISHED, "DEADLINE_EXCEEDED")
"""Codes that count into the latency. An abandoned call counts with the time that it waited: without the slowest
calls the service would look faster."""
SERVER_PARTS = ("queue", "fetch", "compute", "store")


@dataclass(frozen=True)
class Window:
    """The part of a step that is measured: from the end of its warm-up until nothing more is sent. Times are those of
    the event loop's clock, in seconds."""

    start_s: float
    stop_s: float

    def holds(self, moment_s: float) -> bool:
        return self.start_s <= moment_s < self.stop_s

    @property
    def length_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass
class Interval:
    """Figures of one interval of the window: latencies and errors of the calls due in it, and the number of answers
    that arrived in it."""

    latency: Histogram = field(default_factory=Histogram)
    answered: int = 0
    errors: int = 0


class StepRecorder:
    """Counts the calls of a step and their times.

    Args:
        window: The part of the step that is measured.
        interval_s: Length of an interval of the timeline in seconds.

    Attributes:
        sent: Number of calls due in the window that were sent.
        answered: Number of answers without error that arrived in the window, whenever their calls were due.
        answers: Histogram of the times from the window's start to each later answer without error, also after its
            end.
        latency: Histogram of the times from when a call was due to its answer.
        lag: Histogram of the times from when a call was due to when it was sent.
        server: Histograms of the times that the slowest rank reports, by part: queue, fetch, compute, store.
        rest: Histogram of the times from sending to the answer minus those of `server`: network, gRPC and the tester.
        codes: Number of calls by code: those due in the window, and those due in the warm-up that had no answer.
    """

    def __init__(self, window: Window, interval_s: float) -> None:
        self.window = window
        self.interval_s = interval_s
        self.sent = 0
        self.answered = 0
        self.answers = Histogram()
        self.latency = Histogram()
        self.lag = Histogram()
        self.rest = Histogram()
        self.server = {part: Histogram() for part in SERVER_PARTS}
        self.codes: Counter[str] = Counter()
        self.intervals: defaultdict[int, Interval] = defaultdict(Interval)

    def begin(self, due_s: float, sent_s: float) -> None:
        """Counts a call that was sent, and its delay, if it was due in the window. Times are as in `Window`."""
        if self.window.holds(due_s):
            self.sent += 1
            self.lag.add(sent_s - due_s)

    def end(self, due_s: float, sent_s: float, ended_s: float, reply: Reply) -> None:
        """Records that a call has ended, with or without error. An answer without error counts as one if it arrived in
        the window; code, latency and times of the ranks count if the call was due in the window or is unfinished."""
        if reply.code == OK and ended_s >= self.window.start_s:
            self.answers.add(ended_s - self.window.start_s)
            if self.window.holds(ended_s):
                self.answered += 1
                self._interval(ended_s).answered += 1
        # A call of the warm-up counts only if it waited through the whole window.
        if not self.window.holds(due_s) and reply.code != UNFINISHED:
            return
        self.codes[reply.code] += 1
        interval = self._interval(max(due_s, self.window.start_s))
        interval.errors += reply.code != OK
        if reply.code in TIMED:
            self.latency.add(ended_s - due_s)
            interval.latency.add(ended_s - due_s)
        if reply.timings:
            self._note_server(reply, ended_s - sent_s)

    @property
    def kept_up(self) -> int:
        """Number of answers without error in a window of the same length that begins later by the median latency,
        since slow calls are answered only after the measured window has begun, and after it has ended."""
        later_s = self.latency.percentile_s(50)
        return self.answers.count_below(later_s + self.window.length_s) - self.answers.count_below(later_s)

    def cut(self, now_s: float) -> None:
        """Ends the window at `now_s`, or at its start if that is later; a window that has ended stays as it is."""
        stop_s = max(min(self.window.stop_s, now_s), self.window.start_s)
        self.window = Window(self.window.start_s, stop_s)

    def _note_server(self, reply: Reply, seconds: float) -> None:
        for part, histogram in self.server.items():
            slowest = max(getattr(timing, f"{part}_s") for timing in reply.timings)
            histogram.add(slowest)
            seconds -= slowest
        self.rest.add(seconds)

    def _interval(self, moment_s: float) -> Interval:
        return self.intervals[int((moment_s - self.window.start_s) / self.interval_s)]

    def timeline(self) -> list[dict[str, Any]]:
        """Returns the figures of each interval with calls, as JSON values, in order; p50 and p99 are None where no
        latency was counted."""
        rows = []
        for number, interval in sorted(self.intervals.items()):
            known = interval.latency.count > 0
            rows.append(
                {
                    "start_s": round(number * self.interval_s, 3),
                    "answered_per_s": interval.answered / self.interval_s,
                    "errors": interval.errors,
                    "p50_s": interval.latency.percentile_s(50) if known else None,
                    "p99_s": interval.latency.percentile_s(99) if known else None,
                }
            )
        return rows
