"""The interface of trackers: services such as Weights & Biases or MLflow that get the metrics of a run while it goes
on. docs/tracking.md has an example of one's own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from controller.tracking.metrics import Sample

END_S = 30.0
"""Longest time, in seconds, that the end of a run waits for a tracker."""

Status = Literal["finished", "stopped", "failed"]
"""How a run ended: with its summary, by a signal or Ctrl-C, or with an error. One that failed or was stopped may be
resumed."""


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run for a tracker.

    Attributes:
        name: Name of the run directory, unique among the runs below `run.directory`.
        directory: Path of the run directory, in which a tracker may write files of its own.
        project: `tracking.project` of the config.
        algorithm: Name of the algorithm.
        identity: The content of `run.json`: command line, version, commit, seed, platforms of the services.
    """

    name: str
    directory: Path
    project: str
    algorithm: str
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Started:
    """Answer of a tracker that has started.

    Attributes:
        id: Id by which the tracker finds the run again when it is resumed.
        last_step: Number of the last step that the tracker holds; -1: none. Steps up to it are not sent again, and
            steps after it that the run has done already are sent first.
        url: Address at which people see the run. Empty: there is none.
    """

    id: str
    last_step: int = -1
    url: str = ""


def without_credentials(text: str) -> str:
    """Returns a text with the user and password of each URL in it removed."""
    return re.sub(r"//[^/@\s]*@", "//", text)


class Tracker(ABC):
    """A tracker of one run. The constructor takes no arguments and does nothing.

    All methods but `check` are called from one thread, which does nothing else, in the order `start`, any number of
    `samples` and `step` with growing steps, `end`. Calls may take their time, and may raise any error, which is
    counted: the run does not wait for them, except for `END_S` at its end.
    """

    @classmethod  # noqa: B027 - the default is a choice
    def check(cls) -> None:
        """Raises ConfigError where the tracker cannot be used, such as for a package or an account that is missing.
        Called before anything of the run starts. Default: it can be used."""

    @abstractmethod
    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        """Starts to track a run, or continues to.

        Args:
            run: Facts of the run.
            config: Tables of its resolved config; they have no secrets.
            resumed_id: `Started.id` of the run before it was resumed; empty for a run that begins.
        """

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a finished step, those of its line in `metrics.jsonl`, by name. Step 0 is the
        evaluation before training."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027 - as above
        """Takes sample responses of the evaluation after a step, before the metrics of that step. Default: ignores
        them."""

    @abstractmethod
    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Ends tracking, after all steps.

        Args:
            status: How the run ended.
            summary: Figures of the run, those of `summary.json` without its identity; empty unless it has finished.
        """
