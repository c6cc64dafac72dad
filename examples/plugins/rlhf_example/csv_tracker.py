"""A tracker of one's own: writes a few metrics of each step to a table that spreadsheets open."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

from controller.tracking.tracker import Started, Status, TrackedRun, Tracker

COLUMNS = ("reward/mean", "kl/mean", "evaluation/accuracy", "time/step_s")


class CsvTracker(Tracker):
    """Writes `metrics.csv` in the run directory. A resumed run continues it after its last line."""

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        path = run.directory / "metrics.csv"
        steps = [row[0] for row in csv.reader(path.open())][1:] if resumed_id else []
        self._file = path.open("a" if resumed_id else "w", newline="")
        self._table = csv.writer(self._file)
        if not resumed_id:
            self._table.writerow(["step", *COLUMNS])
        return Started(path.name, last_step=int(steps[-1]) if steps else -1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._table.writerow([step, *(metrics.get(name, "") for name in COLUMNS)])
        self._file.flush()

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._file.close()
