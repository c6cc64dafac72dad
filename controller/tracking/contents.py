"""Reads the files of a run directory that its report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from controller.tracking.figures import Figures
from controller.tracking.metrics import METRICS_FILE
from controller.tracking.run_directory import read_json
from rlhf.errors import ConfigError

CONFIG_FILE = "config.toml"
SUMMARY_FILE = "summary.json"
RUN_FILE = "run.json"
"""Name of the JSON file with the run's identity: algorithm, command line, platform. It is written before the first
step."""
ROLLOUTS = "rollouts"
"""Name of the directory with the rows of steps, `step-N.jsonl`."""


@dataclass(frozen=True)
class RunContents:
    """Contents of a run directory.

    Attributes:
        name: Name of the directory.
        figures: Figures accumulated from metrics and samples.
        run: Content of `run.json`.
        summary: Content of `summary.json`; empty before the end of the run.
        config: Text of the configuration with all defaults.
        is_running: Whether the run is still under way.
    """

    name: str
    figures: Figures
    run: Mapping[str, Any]
    summary: Mapping[str, Any]
    config: str
    is_running: bool = False

    @staticmethod
    def read(run_dir: Path, figures: Figures | None = None, *, is_running: bool = False) -> RunContents:
        """Reads a run directory; files that are missing count as empty.

        Args:
            run_dir: The run directory.
            figures: Figures of the metrics and samples. Default: they are read from the files.
            is_running: Whether the run is still under way.

        Raises:
            ConfigError: There is no such directory, or it has no file of a run.
            RlhfError: A file is damaged.
        """
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {run_dir}: no such directory")
        config = run_dir / CONFIG_FILE
        if figures is None and not config.is_file() and not (run_dir / METRICS_FILE).is_file():
            raise ConfigError(f"run directory {run_dir}: it has neither {METRICS_FILE} nor {CONFIG_FILE}")
        return RunContents(
            name=run_dir.resolve().name,
            figures=figures or Figures.read(run_dir),
            run=read_json(run_dir / RUN_FILE),
            summary=read_json(run_dir / SUMMARY_FILE),
            config=config.read_text() if config.is_file() else "",
            is_running=is_running,
        )


def time_text(unix_s: float) -> str:
    """Returns a Unix time, in seconds, as text, for example 2026-01-01 12:00:00 UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
