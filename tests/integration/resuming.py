"""Tools of the tests that kill a run and resume it: the controller as a process group, and results that must be
equal."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.checkpoints.store import COMMIT, DIRECTORY
from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Processes, wait_until, write_config

RUN_TIMEOUT_S = 150.0
UNEQUAL = ("time/", "mem/", "rank/")
"""Metrics that may differ between runs of one seed."""


def with_tables(config: Config, **tables: dict[str, Any]) -> Config:
    """A config with other values in some of its tables."""
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in tables.items()}
    return config.model_copy(update=changed)


@dataclass
class Results:
    """The results of a run that its seed determines."""

    metrics: list[dict[str, float]]
    samples: str
    sha256: str

    @staticmethod
    def of(run_dir: Path) -> Results:
        lines = [
            {key: value for key, value in line.items() if not key.startswith(UNEQUAL)}
            for line in read_metrics(run_dir)
        ]
        summary = json.loads((run_dir / "summary.json").read_text())
        return Results(lines, (run_dir / "samples.jsonl").read_text(), summary["actor_sha256"])


@dataclass
class Resumable:
    """A run of `rlhf-controller` that is killed and resumed.

    Attributes:
        config: Its configuration, with a run directory of its own.
        directory: Directory of its config file.
        algorithm: Name of the algorithm.
        options: Further options of all commands, such as --launch.
    """

    config: Config
    directory: Path
    algorithm: str = "ppo"
    options: tuple[str, ...] = ("--take-over",)
    processes: Processes = field(default_factory=Processes)

    @property
    def run_dir(self) -> Path:
        (found,) = self.config.run.directory.glob("*-*-*")
        return found

    @property
    def steps_done(self) -> int:
        """Number of the last step with metrics; -1 before the first."""
        with contextlib.suppress(ValueError):
            return max((int(line["step"]) for line in read_metrics(self.run_dir)), default=-1)
        return -1

    def start(self) -> subprocess.Popen[str]:
        """Starts the run."""
        path = write_config(self.config, self.directory / "run.toml")
        return self._command("--algo", self.algorithm, "--config", str(path))

    def resume(self, *options: str) -> subprocess.Popen[str]:
        """Goes on with the run."""
        return self._command("--resume", str(self.run_dir), *options)

    def has_checkpoint(self, step: int) -> bool:
        """Whether there is the checkpoint of this step or of a later one."""
        with contextlib.suppress(ValueError):
            names = [path.parent.name for path in (self.run_dir / DIRECTORY).glob(f"step-*/{COMMIT}")]
            return any(int(name.removeprefix("step-")) >= step for name in names)
        return False

    def kill_after(self, process: subprocess.Popen[str], step: int) -> None:
        """Waits for the checkpoint of a step, and kills the controller and all that it has started."""
        wait_until(
            lambda: self.has_checkpoint(step) or process.poll() is not None, RUN_TIMEOUT_S, f"step {step}"
        )
        assert process.poll() is None, process.communicate()
        self.kill(process)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kills the process group of a controller, and its services, which have groups of their own."""
        os.killpg(process.pid, signal.SIGKILL)
        self.processes.kill()
        process.communicate()

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
        """Waits for the end of a command; returns what it has said."""
        out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        assert process.returncode == code, out + err
        return out, err

    def _command(self, *arguments: str) -> subprocess.Popen[str]:
        return self.processes.start("rlhf-controller", *arguments, *self.options, start_new_session=True)


@contextlib.contextmanager
def resumable(config: Config, directory: Path, **fields: Any) -> Iterator[Resumable]:
    """A run with a directory of its own, of which nothing lives afterwards."""
    directory.mkdir(exist_ok=True)
    run = Resumable(with_tables(config, run={"directory": directory / "runs"}), directory, **fields)
    try:
        yield run
    finally:
        run.processes.kill()


def moments(seed: int, count: int, longest_s: float) -> list[float]:
    """Random times, in seconds; the seed is shown by a test that fails."""
    print(f"seed of the moments: {seed}")
    chosen = random.Random(seed)
    return [chosen.uniform(0, longest_s) for _ in range(count)]


def sleep_until(process: subprocess.Popen[str], seconds: float) -> bool:
    """Waits until some time is over or the process has ended; returns whether it still lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    return process.poll() is None
