"""Who did what when: a Chrome trace that opens in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.tracking.run_directory import json_text, write_atomically

Track = tuple[str, str]
"""Process and thread, such as ("actor", "rank 0 compute"): a service and one of its ranks or phases."""


@dataclass(frozen=True)
class Span:
    """An event of the trace; times are Unix times in microseconds, `end_us` not before `start_us`."""

    track: Track
    name: str
    start_us: int
    end_us: int
    args: Mapping[str, Any]


class Timeline:
    """Collects events, from any thread.

    Memory is bounded: only the last `max_events` are kept (roughly 0.5 KB each, plus their args), and the
    file says in `otherData.dropped_events` how many earlier ones were dropped.
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self._spans: deque[Span] = deque(maxlen=max_events)
        self._num_added = 0
        self._lock = threading.Lock()

    def add(
        self,
        track: Track,
        name: str,
        start_unix_s: float,
        end_unix_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an event.

        Args:
            track: process and thread to draw it on; both are made as they come. Events that overlap share
                a track as long as one contains the other; else they spread over lanes `thread`,
                `thread (2)`, ...
            end_unix_s: one before the start, from a clock that was set back, counts as the start.
            args: shown with the event.
        """
        start_us, end_us = round(start_unix_s * 1e6), round(end_unix_s * 1e6)
        span = Span(track, name, start_us, max(start_us, end_us), dict(args or {}))
        with self._lock:
            self._spans.append(span)
            self._num_added += 1

    def write(self, path: Path) -> None:
        """Write what was added so far, atomically; more may be added and written after.

        Raises:
            RlhfError: the disk refused; one line that names directory and file.
        """
        with self._lock:
            spans, num_added = list(self._spans), self._num_added
        origin_us = min((span.start_us for span in spans), default=0)
        trace = {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": num_added - len(spans), "origin_unix_s": origin_us / 1e6},
            "traceEvents": list(trace_events(spans, origin_us)),
        }
        write_atomically(path, json_text(trace))


def trace_events(spans: Iterable[Span], origin_us: int) -> Iterator[dict[str, Any]]:
    """The events of the Chrome trace format: names of processes and threads, then the spans as "X" events.

    Processes and threads are numbered from 1 in the order in which they first come; times are whole
    microseconds after `origin_us`.
    """
    by_process: dict[str, dict[str, list[Span]]] = {}
    for span in spans:
        process, thread = span.track
        by_process.setdefault(process, {}).setdefault(thread, []).append(span)
    for pid, (process, threads) in enumerate(by_process.items(), 1):
        yield from _name("process", process, pid, 0, order=pid)
        lanes = [
            (thread if number == 1 else f"{thread} ({number})", lane)
            for thread, track in threads.items()
            for number, lane in enumerate(nested_lanes(track), 1)
        ]
        for tid, (thread, lane) in enumerate(lanes, 1):
            yield from _name("thread", thread, pid, tid, order=tid)
            for span in lane:
                yield _complete_event(span, pid, tid, origin_us)


def nested_lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few lanes as come, in order of start, so that in each lane any two are apart
    or one contains the other: viewers drop or misdraw events of one thread that overlap in part."""
    lanes: list[_Lane] = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        lane = next((lane for lane in lanes if lane.has_room_for(span)), None)
        if lane is None:
            lane = _Lane()
            lanes.append(lane)
        lane.spans.append(span)
        lane.open_ends.append(span.end_us)
    return [lane.spans for lane in lanes]


@dataclass
class _Lane:
    spans: list[Span] = field(default_factory=list)
    open_ends: list[int] = field(default_factory=list)
    """Ends of the spans that contain the moment reached, the innermost last."""

    def has_room_for(self, span: Span) -> bool:
        """Whether a span, which starts no earlier than any before, overlaps none of the lane in part."""
        while self.open_ends and self.open_ends[-1] <= span.start_us:
            self.open_ends.pop()
        return not self.open_ends or span.end_us <= self.open_ends[-1]


def _name(kind: str, name: str, pid: int, tid: int, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _complete_event(span: Span, pid: int, tid: int, origin_us: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track[0],
        "pid": pid,
        "tid": tid,
        "ts": span.start_us - origin_us,
        "dur": span.end_us - span.start_us,
        "args": span.args,
    }
