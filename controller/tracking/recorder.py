"""Records a run: writes metrics, samples, timeline, summary and report, and updates the terminal display."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.role_groups.dataflow import CallRecord
from controller.role_groups.replacement import Replaced
from controller.role_groups.residency import OFFLOAD, ONLOAD
from controller.tracking.contents import ROLLOUTS, RUN_FILE, SUMMARY_FILE, time_text
from controller.tracking.figures import Figures
from controller.tracking.metrics import MetricsWriter, Sample, SamplesWriter
from controller.tracking.observer import Observer
from controller.tracking.progress import Progress
from controller.tracking.report import write_report
from controller.tracking.run_directory import RunDirectory, json_text, writing
from controller.tracking.timeline import Timeline

REPORT_EVERY_S = 60.0
"""Time, in seconds, between two reports while the run is under way."""


class Recorder:
    """Context manager that writes the files of a run while it is under way, and shows its progress. On exit it writes
    the report, also after an error. Files of the run that are there are continued.

    Args:
        directory: Run directory.
        progress: Terminal display, which is entered and exited with the recorder.
        identity: Identity of the run as JSON values; see `controller.identity`. Default: empty.
        observers: Get each record after it was written. Default: none.
    """

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        identity: Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.directory = directory
        self.progress = progress
        self.started_s = time.time()
        self._identity = dict(identity or {})
        self._observers = observers
        self._reported_s = time.monotonic()
        self._figures = Figures.read(directory.path)
        self._offloaded_s: dict[str, float] = {}
        directory.write_json(RUN_FILE, self._identity)
        with ExitStack() as opened:
            self._metrics = opened.enter_context(closing(MetricsWriter(directory.path)))
            self._samples = opened.enter_context(closing(SamplesWriter(directory.path)))
            self._timeline = Timeline(directory.path, self.started_s)
            opened.pop_all()

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self.directory.path

    @property
    def metric_names(self) -> Collection[str]:
        """Names of all metrics that the run has had so far."""
        return self._figures.last.keys()

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        # A full disk is reported by the write that failed; errors here must not hide that one.
        try:
            self._metrics.check()
            self._timeline.close()
            write_report(self.path, self._figures)
        except Exception:
            if error is None:
                raise
        finally:
            self._metrics.close()
            self._samples.close()

    @contextmanager
    def following(
        self, running: Callable[[], Mapping[str, str]], memory: Callable[[], Mapping[str, int]]
    ) -> Iterator[None]:
        """Context manager that updates the displayed running calls and memory every 0.25 s, on a thread of its own.

        Args:
            running: Function that returns the progress of the running calls, by "service.method".
            memory: Function that returns the memory of each service, in bytes, by name.
        """
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(0.25):
                self.progress.stage(running())
                for service, nbytes in memory().items():
                    self.progress.memory(service, nbytes)

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a finished step to the files and the display; step 0 is the evaluation before training.
        Writes a report if the last one is `REPORT_EVERY_S` old. Raises RlhfError where writing fails."""
        self._metrics.log(step, metrics)
        self._figures.add(step, metrics)
        self.progress.step(step, metrics)
        for observer in self._observers:
            observer.step(step, metrics)
        if time.monotonic() - self._reported_s >= REPORT_EVERY_S:
            write_report(self.path, self._figures, is_running=True)
            self._reported_s = time.monotonic()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Writes the sample responses of an evaluation after step `step` to `samples.jsonl`, and keeps them for the
        report. Raises RlhfError where writing fails."""
        self._samples.log(step, rows)
        self._figures.add_samples(step, rows)
        for observer in self._observers:
            observer.samples(step, rows)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows of a step, JSON values by name, to `rollouts/step-N.jsonl`, one per line; no file where there are
        none. Raises RlhfError where writing fails."""
        if rows:
            with writing(self.path, ROLLOUTS):
                (self.path / ROLLOUTS).mkdir(exist_ok=True)
            lines = "".join(json_text({"step": step, **row}) + "\n" for row in rows)
            self.directory.write_text(f"{ROLLOUTS}/step-{step}.jsonl", lines)

    def calls(self, step: int, records: Iterable[CallRecord], rows: int = 0) -> None:
        """Writes the calls of a step to the timeline: each call on the controller's track of its service, and its
        phases (queue, fetch, compute, store) on the track of each rank. A call whose rows were sent in chunks is as
        many calls. Services that take turns in the memory of devices have a track each that shows when they were
        offloaded. `rows`: number of rows that the step trained on. Raises RlhfError where writing fails."""
        records = list(records)
        for record, chunk in ((sent, number) for each in records for number, sent in enumerate(each.sent)):
            self._residency(record, step)
            args = {"step": step, "policy_version": record.policy_version}
            args |= {"chunk": chunk} if chunk else {}
            track = ("controller", record.service)
            self._timeline.add(track, record.method, record.started_s, record.ended_s, args)
            for rank, response in enumerate(record.responses):
                rank_track = (record.service, f"rank {rank}")
                self._rank_call(rank_track, record.method, response.outcome.timing, step)
        self._timeline.flush()
        for observer in self._observers:
            observer.calls(step, records, rows)

    def replaced(self, replaced: Replaced) -> None:
        """Writes a service that was lost and replaced to `run.json`, and to the timeline from its loss on. Raises
        RlhfError where writing fails."""
        entry = {
            "service": replaced.service,
            "step": replaced.step,
            "cause": replaced.cause,
            "at": time_text(replaced.lost_s),
            "seconds": round(replaced.serves_s - replaced.lost_s, 3),
        }
        self._identity["replaced"] = [*self._identity.get("replaced", []), entry]
        self.directory.write_json(RUN_FILE, self._identity)
        track = ("controller", replaced.service)
        args = {"step": replaced.step, "cause": replaced.cause}
        self._timeline.add(track, "lost and replaced", replaced.lost_s, replaced.serves_s, args)

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Writes `summary.json`, which has `figures` and the identity of the run. Raises RlhfError where writing fails,
        or where `metrics.jsonl` was deleted or replaced."""
        self._metrics.check()
        self.directory.write_json(SUMMARY_FILE, {**figures, **self._identity})
        for observer in self._observers:
            observer.summary(figures)

    def _residency(self, record: CallRecord, step: int) -> None:
        if record.method == OFFLOAD:
            self._offloaded_s[record.service] = record.ended_s
        elif record.method == ONLOAD and (since_s := self._offloaded_s.pop(record.service, None)):
            track = ("device memory", record.service)
            self._timeline.add(track, "offloaded", since_s, record.started_s, {"step": step})

    def _rank_call(self, track: tuple[str, str], method: str, timing: Any, step: int) -> None:
        start = timing.arrived_unix_s
        if not start:
            return
        args = {
            "step": step,
            "fetched": timing.fetched_bytes,
            "inline": timing.inline_bytes,
            "stored": timing.stored_bytes,
        }
        if timing.peak_device_bytes:
            args["peak_device"] = timing.peak_device_bytes
        for part in ("queue", "fetch", "compute", "store"):
            end = start + getattr(timing, f"{part}_s")
            if end > start:
                self._timeline.add(track, method if part == "compute" else part, start, end, args)
            start = end
