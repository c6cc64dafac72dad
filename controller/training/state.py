"""The state of a run that a checkpoint holds, beside that of the services."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from controller.checkpoints.kept import KeptState
from controller.training.evaluation import Evaluator
from controller.training.feed import Feed
from controller.training.step_metrics import StepMetrics


class RunState:
    """The state of a run after a step.

    Args:
        feed: Position in the data.
        totals: Totals of the steps.
        evaluator: History of the evaluations.

    Attributes:
        step: Number of the last step that is done.
        is_ended: Whether the algorithm has made that step the last (`Step.stop`).
        kept: State that the algorithm keeps.
    """

    def __init__(self, feed: Feed, totals: StepMetrics, evaluator: Evaluator) -> None:
        self.step = 0
        self.is_ended = False
        self.kept = KeptState()
        self._feed, self._totals, self._evaluator = feed, totals, evaluator
        self._position: Mapping[str, Any] = {}
        self._kept_then: Mapping[str, Any] | None = None
        self._began_s = time.monotonic()

    @property
    def wall_s(self) -> float:
        """Duration of the run in seconds, without the time between its end and its resumption."""
        return time.monotonic() - self._began_s

    def passed(
        self, step: int, *, is_ended: bool, feed: Mapping[str, Any], kept: Mapping[str, Any] | None
    ) -> None:
        """Sets the step that was done last.

        Args:
            step: Number of the step.
            is_ended: Whether the algorithm has made it the last.
            feed: Position in the data after the step, as JSON values. Empty: the present one.
            kept: State that the algorithm kept after the step, as JSON values. None: the present one.
        """
        self.step, self.is_ended = step, is_ended
        self._position, self._kept_then = feed, kept

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON values. Raises ConfigError where the algorithm keeps what a checkpoint cannot
        hold."""
        return {
            "step": self.step,
            "is_ended": self.is_ended,
            "wall_s": self.wall_s,
            "feed": self._position or self._feed.state(),
            "totals": self._totals.state(),
            "evaluations": self._evaluator.history,
            "kept": self.kept.state() if self._kept_then is None else self._kept_then,
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Sets the state to one that `to_json` returned; what the algorithm keeps is set when it is registered.
        Raises ConfigError where the position is one in other data."""
        self.step, self.is_ended = stored["step"], stored["is_ended"]
        self._began_s = time.monotonic() - stored["wall_s"]
        self._feed.restore(stored["feed"])
        self._totals.restore(stored["totals"])
        self._evaluator.history = [
            {name: float(value) for name, value in each.items()} for each in stored["evaluations"]
        ]
        self._evaluator.is_recorded = not self.step
        self.kept.restore(stored["kept"])
