"""The timeline of a run: a Chrome trace that opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is an array of events, one on each line, written as they come. The format allows a missing bracket at the end,
so the trace of a run that was killed opens too."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from controller.tracking.run_directory import AppendFile, json_text
from rlhf.errors import RlhfError

Track = tuple[str, str]
"""Names of the process and the thread that an event is shown in, for example ("actor", "rank 0") for a service and
one of its ranks."""

TIMELINE_FILE = "timeline.json"
EARLIER_FILE = "timeline-earlier.json"
MAX_BYTES = 64 << 20
"""Size in bytes at which a timeline file is closed and the next one begun; viewers take some seconds to open it."""


@dataclass(frozen=True)
class Span:
    """Event of the trace. Times are Unix times in microseconds, and `end_us` is not before `start_us`."""

    track: Track
    name: str
    start_us: int
    end_us: int
    args: Mapping[str, Any]


class Timeline:
    """Writes events to `timeline.json` of a run, from any thread.

    At `MAX_BYTES` the file is renamed to `timeline-earlier.json`, replacing an earlier one, and a new one is begun. So
    the two files have the last events of a run, and memory holds none. A `timeline.json` that is there, without the
    end of the array, is continued.

    Args:
        run_dir: The run directory.
        started_unix_s: Unix time, in seconds, that is time 0 of the trace; a timeline that is continued keeps its own.
    """

    def __init__(self, run_dir: Path, started_unix_s: float) -> None:
        """Raises RlhfError where the file cannot be created, or the one that is there is no timeline."""
        self._run_dir = run_dir
        self._started_us = round(started_unix_s * 1e6)
        self._added: list[Span] = []
        self._lock = threading.Lock()
        if (run_dir / TIMELINE_FILE).exists():
            self._go_on()
        else:
            self._begin()

    def add(
        self,
        track: Track,
        name: str,
        start_unix_s: float,
        end_unix_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds an event, which the next `flush` writes.

        Args:
            track: Process and thread of the event, created with their first event. Overlapping events are in one
                thread where one contains the other, else in lanes `thread`, `thread (2)`, ...
            name: Name of the event.
            start_unix_s: Start of the event, Unix time in seconds.
            end_unix_s: End of the event, likewise. An end before the start, from a clock that was set back, counts as
                the start.
            args: Values shown with the event.
        """
        start_us, end_us = round(start_unix_s * 1e6), round(end_unix_s * 1e6)
        span = Span(track, name, start_us, max(start_us, end_us), dict(args or {}))
        with self._lock:
            self._added.append(span)

    def flush(self) -> None:
        """Writes the events that were added. Lanes are assigned best where overlapping events are flushed together.

        Raises:
            RlhfError: Writing failed; the text is one line with directory, reason and file.
        """
        with self._lock:
            added, self._added = self._added, []
            if self._num_bytes > MAX_BYTES:
                self._end()
                os.replace(self._run_dir / TIMELINE_FILE, self._run_dir / EARLIER_FILE)
                self._begin()
            events = [event for span in sorted(added, key=_by_start) for event in self._events(span)]
            if events:
                self._write("".join(f",\n{json_text(event)}" for event in events))

    def close(self) -> None:
        """Writes the events that were added, ends the JSON array and closes the file. Raises RlhfError where writing
        fails."""
        self.flush()
        self._end()

    def _begin(self) -> None:
        self._tracks = _Tracks()
        origin = {"unix_s": self._started_us / 1e6}
        event = {"ph": "M", "name": "run_started", "pid": 0, "tid": 0, "args": origin}
        first = f"[\n{json_text(event)}".encode()
        self._file = AppendFile(self._run_dir, TIMELINE_FILE, first, syncs=False)
        self._num_bytes = len(first)

    def _go_on(self) -> None:
        path = self._run_dir / TIMELINE_FILE
        try:
            events = read_events(path)
            self._started_us = round(events[0]["args"]["unix_s"] * 1e6)
            self._tracks = _Tracks.of(events)
        except (ValueError, LookupError, TypeError) as error:
            raise RlhfError(f"{path}: not the timeline of a run: {error}") from None
        self._num_bytes = path.stat().st_size
        self._file = AppendFile(self._run_dir, TIMELINE_FILE, syncs=False)

    def _end(self) -> None:
        self._write("\n]\n")
        self._file.close()

    def _write(self, text: str) -> None:
        encoded = text.encode()
        self._file.append(encoded)
        self._num_bytes += len(encoded)

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        """Yields the events of the trace for a span: names of its process and thread where they are new, and its "X"
        event."""
        (pid, tid), names = self._tracks.place(span)
        yield from names
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.track[0],
            "pid": pid,
            "tid": tid,
            "ts": span.start_us - self._started_us,
            "dur": span.end_us - span.start_us,
            "args": span.args,
        }


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a timeline file. An incomplete last line, left by a writer that was killed, is skipped.

    Raises:
        ValueError: The file is not a timeline, or another line is damaged.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if lines[0] != "[":
        raise ValueError(f"{path} is no timeline")
    events = []
    for number, line in enumerate(lines[1:], 2):
        if line.startswith("]"):
            break
        try:
            events.append(json.loads(line.removesuffix(",")))
        except ValueError:
            if number < len(lines):
                raise
    return events


def thread_of(lane: str) -> str:
    """Returns the name of a track's thread from that of one of its lanes."""
    return re.sub(r" \(\d+\)$", "", lane)


class _Tracks:
    """Assigns numbers to processes, and within each process to threads, from 1 in the order of their first events.
    Events of one track that overlap in part get different threads."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[int, int] = {}
        self._lanes: dict[Track, list[_Lane]] = {}

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> Self:
        """Returns the numbers that the events of a trace name; later events continue its lanes."""
        tracks, processes = cls(), dict[int, str]()
        for event in events:
            name, pid, tid = event["args"].get("name", ""), event["pid"], event["tid"]
            if event["name"] == "process_name":
                tracks._pids[name] = pid
                processes[pid] = name
            elif event["name"] == "thread_name":
                tracks._tids[pid] = max(tid, tracks._tids.get(pid, 0))
                track = processes[pid], thread_of(name)
                tracks._lanes.setdefault(track, []).append(_Lane(tid))
        return tracks

    def place(self, span: Span) -> tuple[tuple[int, int], list[dict[str, Any]]]:
        """Returns the numbers (process, thread) of a span, and the events that name them where they are new.

        Viewers drop or misdraw events of one thread that overlap in part, so a span goes into the first lane of its
        track without an event that it overlaps in part."""
        process, thread = span.track
        names: list[dict[str, Any]] = []
        if process not in self._pids:
            self._pids[process] = len(self._pids) + 1
            names += _names("process", process, self._pids[process], 0)
        pid = self._pids[process]
        lanes = self._lanes.setdefault(span.track, [])
        lane = next((lane for lane in lanes if lane.has_room_for(span)), None)
        if lane is None:
            self._tids[pid] = self._tids.get(pid, 0) + 1
            lane = _Lane(self._tids[pid])
            lanes.append(lane)
            names += _names(
                "thread", thread if len(lanes) == 1 else f"{thread} ({len(lanes)})", pid, lane.tid
            )
        lane.take(span)
        return (pid, lane.tid), names


@dataclass
class _Lane:
    """Spans that are shown in one thread; any two of them are disjoint or nested."""

    tid: int
    settled_us: int = -(1 << 62)
    """End of the spans that later ones need not be compared with, Unix time in microseconds."""
    open: list[Span] = field(default_factory=list)

    def has_room_for(self, span: Span) -> bool:
        return span.start_us >= self.settled_us and all(_apart_or_nested(span, other) for other in self.open)

    def take(self, span: Span) -> None:
        last = max((other.end_us for other in self.open), default=self.settled_us)
        if span.start_us >= last:
            self.settled_us, self.open = last, []
        self.open.append(span)


def _apart_or_nested(one: Span, other: Span) -> bool:
    if one.end_us <= other.start_us or other.end_us <= one.start_us:
        return True
    starts, ends = one.start_us - other.start_us, one.end_us - other.end_us
    return starts * ends <= 0


def _by_start(span: Span) -> tuple[int, int]:
    return span.start_us, -span.end_us


def _names(kind: str, name: str, pid: int, tid: int) -> list[dict[str, Any]]:
    order = tid or pid
    return [
        {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]
