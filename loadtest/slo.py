"""Service level objectives: "p99=50ms,errors=0"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ConfigError

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_KNOWN = "pNN, mean or max with a time (50ms), errors with a number or a share (0, 0.1%), throughput (200)"


@dataclass(frozen=True)
class Objective:
    """One service level objective: a bound of a measured figure.

    Attributes:
        text: The objective as given.
        figure: Measured figure: "latency", "errors", "error_share" or "throughput".
        bound: Largest value allowed: seconds, a number of errors, or a share. For throughput the smallest, in calls per
            second.
        name: Statistic of the latency: "mean", "max" or a percentile such as "p99".
    """

    text: str
    figure: str
    bound: float
    name: str = ""


@dataclass(frozen=True)
class ObjectiveResult:
    """An objective and its measured value in a step. `measured` is None if no call ended or, for a latency, if no call
    was answered; `met` is then False."""

    objective: Objective
    measured: float | None

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        if self.objective.figure == "throughput":
            return self.measured >= self.objective.bound
        return self.measured <= self.objective.bound


def parse(text: str) -> list[Objective]:
    """Parses a comma-separated list of objectives, such as "p99=50ms,errors=0"; it may be empty.

    Raises:
        ConfigError: An objective is not known; the text lists the known forms.
    """
    return [_objective(part.strip()) for part in text.split(",") if part.strip()]


def judge(objectives: list[Objective], step: dict[str, Any], percentile_s: Any) -> list[ObjectiveResult]:
    """Compares the figures of a step with each objective; returns one ObjectiveResult per objective, in order.

    Args:
        objectives: The objectives.
        step: Figures of the step, as in the JSON result.
        percentile_s: Function from a percentage to that percentile of the latency in seconds.
    """
    return [ObjectiveResult(objective, _measured(objective, step, percentile_s)) for objective in objectives]


def _objective(text: str) -> Objective:
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(r"mean|max|p\d{1,2}(\.\d+)?|p100", name):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", value)
        if match:
            return Objective(text, "latency", float(match[1]) / _PER_SECOND[match[2]], name)
    if name == "errors" and (match := re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", value)):
        bound = float(match[1])
        return Objective(text, "error_share", bound / 100) if match[2] else Objective(text, "errors", bound)
    if name == "throughput" and re.fullmatch(r"\d+(\.\d+)?", value):
        return Objective(text, "throughput", float(value))
    raise ConfigError(f"--slo: {text!r} is not an objective; known: {_KNOWN}")


def _measured(objective: Objective, step: dict[str, Any], percentile_s: Any) -> float | None:
    failed, ended = sum(step["errors"].values()), step["ended"]
    if not ended:
        return None
    if objective.figure == "throughput":
        return step["throughput_per_s"]
    if objective.figure == "errors":
        return failed
    if objective.figure == "error_share":
        return failed / ended
    if not step["latency_s"]:
        return None
    if objective.name in ("mean", "max"):
        return step["latency_s"][objective.name]
    return percentile_s(float(objective.name[1:]))
