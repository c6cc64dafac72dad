"""Records a run: metrics, samples, timeline, progress, summary, report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.role_groups.dataflow import CallRecord
from controller.tracking.contents import RUN_FILE, SUMMARY_FILE
from controller.tracking.figures import Figures
from controller.tracking.metrics import MetricsWriter, Sample, SamplesWriter
from controller.tracking.progress import Progress
from controller.tracking.report import write_report
from controller.tracking.run_directory import RunDirectory
from controller.tracking.timeline import Timeline

REPORT_EVERY_S = 60.0


class Recorder:
    """Writes the files of a run as it goes, and shows its progress. A context manager, which writes the report at the
    end, also after an error.

    Args:
        directory: Directory of the run.
        progress: Display of the run.
        identity: Identity of the run; see `controller.identity`.
        report_every_s: Seconds between two reports of a running run.
    """

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        identity: Mapping[str, Any] | None = None,
        report_every_s: float = REPORT_EVERY_S,
    ) -> None:
        self.directory = directory
        self.progress = progress
        self.started_s = time.time()
        self._identity = dict(identity or {})
        self._report_every_s = report_every_s
        self._reported_s = time.monotonic()
        self._figures = Figures()
        self._metrics = MetricsWriter(directory.path)
        self._samples = SamplesWriter(directory.path)
        self._timeline = Timeline(directory.path, self.started_s)
        directory.write_json(RUN_FILE, self._identity)

    @property
    def path(self) -> Path:
        """Directory of the run."""
        return self.directory.path

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
        """Shows running calls and memory for as long as the context lasts."""
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
        """Records the metrics of a finished step; step 0 is the evaluation before training."""
        self._metrics.log(step, metrics)
        self._figures.add(step, metrics)
        self.progress.step(step, metrics)
        if time.monotonic() - self._reported_s >= self._report_every_s:
            write_report(self.path, self._figures, is_running=True)
            self._reported_s = time.monotonic()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Records sample responses of an evaluation."""
        self._samples.log(step, rows)
        self._figures.add_samples(step, rows)

    def calls(self, step: int, records: Iterable[CallRecord]) -> None:
        """Records calls on the timeline: on the controller, and their phases on each rank."""
        for record in records:
            args = {"step": step, "policy_version": record.policy_version}
            track = ("controller", record.service)
            self._timeline.add(track, record.method, record.started_s, record.ended_s, args)
            for rank, response in enumerate(record.responses):
                rank_track = (record.service, f"rank {rank}")
                self._rank_call(rank_track, record.method, response.outcome.timing, step)
        self._timeline.flush()

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Writes summary.json: these figures and the identity of the run."""
        self._metrics.check()
        self.directory.write_json(SUMMARY_FILE, {**figures, **self._identity})

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
