"""Writes the report of a run: one HTML file without external resources, made from the files in the run directory."""

from __future__ import annotations

from pathlib import Path

from controller.tracking.contents import RunContents
from controller.tracking.figures import Figures
from controller.tracking.report_page import render
from controller.tracking.run_directory import write_atomically

REPORT_FILE = "report.html"


def write_report(run_dir: Path, figures: Figures | None = None, *, is_running: bool = False) -> Path:
    """Writes `report.html` from `metrics.jsonl`, `samples.jsonl`, `run.json`, `summary.json` and
    `config.toml`; returns its path. A section whose file is missing is left out, so that an interrupted run has a
    report too.

    Args:
        run_dir: The run directory.
        figures: Figures of the metrics and samples. Default: they are read from the files.
        is_running: Whether the run is still under way.

    Raises:
        RlhfError: There is no such directory, a file is damaged, or the report cannot be written.
    """
    contents = RunContents.read(run_dir, figures, is_running=is_running)
    return write_atomically(run_dir / REPORT_FILE, render(contents))
