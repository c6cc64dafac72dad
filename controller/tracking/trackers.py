"""The trackers of a run: finds them by name, and passes on what the run records, each on a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.tracking.metrics import Sample, each_sample, each_step
from controller.tracking.observer import Observer
from controller.tracking.run_directory import RunDirectory, read_json
from controller.tracking.tracker import END_S, Started, Status, TrackedRun, Tracker, without_credentials
from rlhf.errors import ConfigError, RlhfError, one_line
from rlhf.plugins import as_subclass, find_plugin, load_class

GROUP = "rlhf_cluster.trackers"
"""Entry-point group in which installed packages declare trackers: classes, subclasses of `Tracker`."""
BUILT_IN = {
    "wandb": "controller.tracking.wandb_tracker:WandbTracker",
    "mlflow": "controller.tracking.mlflow_tracker:MlflowTracker",
}
TRACKERS_FILE = "trackers.json"
"""File of the run directory with the id of the run in each tracker, and what was not delivered, by name."""
RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
"""Least time, in seconds, between two starts of a tracker whose start has failed; it doubles with each, up to the
second."""
MAX_WAITING = 1000
"""Most records that wait for one tracker; further ones are dropped and counted until there is room again."""


def find_trackers(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """Returns the classes of trackers by name, after each has checked that it can be used.

    Args:
        names: Names as in `tracking.trackers`.

    Raises:
        ConfigError: There is no such tracker (the message lists the known names), it cannot be imported, or it cannot
            be used.
    """
    found = {}
    for name in names:
        try:
            if name in BUILT_IN:
                found[name] = load_class(BUILT_IN[name], Tracker)
            else:
                kind = find_plugin(GROUP, name, type, dict.fromkeys(BUILT_IN, Tracker))
                found[name] = as_subclass(name, kind, Tracker)
            found[name].check()
        except ConfigError as error:
            raise ConfigError(f"tracking.trackers: {error}") from error
        except Exception as error:
            cause = one_line(f"{type(error).__name__}: {error}")
            raise ConfigError(f"tracking.trackers: {name}: its check failed: {cause}") from error
    return found


@dataclass
class Delivery:
    """Counts of the records of a run for one tracker: passed to it, failed in it, and dropped before it."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class _Record:
    """Metrics of a step, or sample responses after it."""

    step: int
    metrics: Mapping[str, float] | None = None
    samples: Sequence[Sample] = ()


@dataclass(frozen=True)
class _End:
    status: Status
    summary: Mapping[str, Any]


class TrackerFeed:
    """Passes the records of a run to one tracker, on a thread of its own.

    Args:
        name: Name of the tracker, for messages.
        kind: Class of the tracker, which is constructed on the thread.
        run, config, resumed_id: Arguments of `Tracker.start`.
        done: Number of the step after which the run is resumed; -1: it begins. The records of the run directory up to
            it that the tracker does not hold are sent first.
        say: Called with a line of text, from the thread.
        started: Called with the id of the run in the tracker, from the thread.
    """

    def __init__(
        self,
        name: str,
        kind: type[Tracker],
        run: TrackedRun,
        config: Mapping[str, Any],
        resumed_id: str,
        done: int,
        say: Callable[[str], None],
        started: Callable[[str], None],
    ) -> None:
        self.delivery = Delivery()
        self.id = resumed_id
        self._name, self._kind = name, kind
        self._run, self._config, self._done = run, config, done
        self._say, self._started = say, started
        self._waiting: queue.Queue[_Record | _End] = queue.Queue(MAX_WAITING)
        self._end: _End | None = None
        self._last_step = -1
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: _Record) -> None:
        """Passes on a record. Never waits: where the tracker is too far behind, the record is dropped and counted."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._trouble("is too slow, and records are dropped")
            self.delivery.dropped += 1

    def end(self, end: _End) -> None:
        """Passes on the end of the run, at once or, where the tracker is too far behind, in `close`."""
        try:
            self._waiting.put_nowait(end)
        except queue.Full:
            self._end = end

    def close(self, deadline_s: float) -> None:
        """Waits for the tracker, after `end`, until a time of `time.monotonic`."""
        try:
            if self._end:
                self._waiting.put(self._end, timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        counts, waiting = self.delivery, self._waiting.qsize()
        if self._thread.is_alive():
            self._say(f"tracker {self._name}: did not end within {END_S:g} s; {waiting} records were waiting")
        if counts.failed or counts.dropped:
            lost = f"{counts.failed} failed, {counts.dropped} were dropped"
            self._say(f"tracker {self._name}: {counts.delivered} records were delivered, {lost}")

    def _work(self) -> None:
        """The thread: starts the tracker, sends what the run has recorded before, then each record as it comes."""
        is_started, pause_s = self._begin(self._done), RETRY_S
        self.delivery.failed += not is_started
        again_s = time.monotonic() + pause_s
        while not isinstance(record := self._waiting.get(), _End):
            if not is_started and time.monotonic() >= again_s:
                is_started, pause_s = self._begin(record.step - 1), min(2 * pause_s, LONGEST_RETRY_S)
                again_s = time.monotonic() + pause_s
            if not is_started:
                self.delivery.failed += 1
            elif record.step > self._last_step:
                self._send(record)
        if is_started:
            is_ended = self._attempt("its end", lambda: self._tracker.end(record.status, record.summary))
            self.delivery.failed += not is_ended

    def _begin(self, done: int) -> bool:
        """Starts the tracker, sends it what it lacks up to step `done`, and returns whether it has started."""
        if not self._attempt("its start", self._start):
            return False
        self.delivery.failed += not self._attempt("the note of its id", lambda: self._started(self.id))
        self.delivery.failed += not self._attempt("earlier steps", lambda: self._catch_up(done))
        return True

    def _start(self) -> None:
        self._tracker = self._kind()
        started = self._tracker.start(self._run, self._config, self.id)
        if not isinstance(started, Started):
            raise TypeError(f"start returned {type(started).__name__}, not Started")
        self.id, self._last_step = started.id, started.last_step
        if started.url:
            self._say(f"tracker {self._name}: {started.url}")

    def _catch_up(self, done: int) -> None:
        for record in _recorded(self._run.directory, self._last_step, done):
            self._send(record)

    def _send(self, record: _Record) -> None:
        step = record.step
        if record.metrics is None:
            is_sent = self._attempt(
                f"samples after step {step}", lambda: self._tracker.samples(step, record.samples)
            )
        else:
            metrics = record.metrics
            is_sent = self._attempt(f"step {step}", lambda: self._tracker.step(step, metrics))
        self.delivery.delivered += is_sent
        self.delivery.failed += not is_sent

    def _attempt(self, what: str, work: Callable[[], None]) -> bool:
        """Calls `work`, and returns whether it raised no error. The first error is shown."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a tracker may raise anything, and changes no run
            self._trouble(f"failed at {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            return False
        return True

    def _trouble(self, text: str) -> None:
        if not (self.delivery.failed or self.delivery.dropped):
            text = without_credentials(text)
            self._say(
                f"tracker {self._name}: {text}; the run continues, and further failures are only counted"
            )


class Trackers(Observer):
    """Context manager that passes the records of a run to its trackers, which never slow, stop or change the run. On
    exit it waits up to `END_S` for them, from `end` on, if that was called.

    Args:
        kinds: Classes of the trackers by name, from `find_trackers`.
        directory: Run directory.
        run, config: Arguments of `Tracker.start`.
        done: Number of the step after which the run is resumed; None: it begins.
        say: Called with lines of text, from any thread.
    """

    def __init__(
        self,
        kinds: Mapping[str, type[Tracker]],
        directory: RunDirectory,
        run: TrackedRun,
        config: Mapping[str, Any],
        done: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._summary: Mapping[str, Any] = {}
        self._ends_s: float | None = None
        self._known: dict[str, Any] = {}
        if kinds:
            try:
                self._known = read_json(directory.path / TRACKERS_FILE)
            except RlhfError as error:
                say(f"{error}; trackers begin anew")
        self._feeds = {
            name: TrackerFeed(
                name,
                kind,
                run,
                config,
                self._known.get(name, {}).get("id", "") if done is not None else "",
                -1 if done is None else done,
                say,
                lambda found, name=name: self._write({name: {"id": found}}),
            )
            for name, kind in kinds.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ends_s is None:
            self.end(kind)
        assert self._ends_s is not None, "set by `end`"
        for feed in self._feeds.values():
            feed.close(self._ends_s)
        if self._feeds:
            # A directory that cannot be written to is reported by what the run itself writes.
            with contextlib.suppress(RlhfError):
                self._write(
                    {name: {"id": feed.id, **vars(feed.delivery)} for name, feed in self._feeds.items()}
                )

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tells the trackers that the run has ended, without waiting for them; nothing may be recorded after that.
        Arguments are those of `__exit__`."""
        status: Status = "finished"
        if kind is not None:
            status = "stopped" if issubclass(kind, KeyboardInterrupt | GeneratorExit) else "failed"
        for feed in self._feeds.values():
            feed.end(_End(status, self._summary))
        self._ends_s = time.monotonic() + END_S

    @property
    def deliveries(self) -> dict[str, Delivery]:
        """Counts of the records of each tracker, by name."""
        return {name: feed.delivery for name, feed in self._feeds.items()}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes on the metrics of a finished step."""
        if self._feeds:
            self._put(_Record(step, {name: float(metrics[name]) for name in sorted(metrics)}))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Passes on sample responses of the evaluation after a step."""
        if self._feeds:
            self._put(_Record(step, samples=tuple(rows)))

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Takes the figures of the run, which trackers get at its end."""
        self._summary = dict(figures)

    def _put(self, record: _Record) -> None:
        for feed in self._feeds.values():
            feed.put(record)

    def _write(self, entries: Mapping[str, Any]) -> None:
        with self._lock:
            self._known |= entries
            self._directory.write_json(TRACKERS_FILE, self._known)


def _recorded(run_dir: Path, after: int, last: int) -> Iterator[_Record]:
    """Yields the records of a run directory of the steps `after` + 1 to `last`, in order."""
    if after >= last:
        return
    samples: dict[int, list[Sample]] = {}
    for step, sample in each_sample(run_dir):
        samples.setdefault(step, []).append(sample)
    for line in each_step(run_dir):
        step = int(line.pop("step"))
        if step > last:
            return
        if step > after:
            if step in samples:
                yield _Record(step, samples=samples[step])
            yield _Record(step, line)
