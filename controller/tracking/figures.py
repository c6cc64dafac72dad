"""Figures of a report: curves, means and peaks, accumulated step by step from metrics and samples, in bounded
memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from controller.tracking.metrics import Sample, each_sample, each_step
from reports.charts import Point

MAX_STRETCHES = 200
"""Maximum number of stretches of a curve after they are merged; each keeps its lowest and its highest point."""
MOST_POINTS = 3
"""Most points of a stretch."""
UNCHARTED = ("time/", "mem/", "transfer/", "rank/")
"""Prefixes of the metrics that a report shows as a mean or a peak instead of a curve."""
THROUGHPUT = "time/tokens_per_s"


class Curve:
    """Curve of a metric over the steps, in the same memory from its first point on: all points of a short run; for a
    long run, the lowest, the highest and one non-finite point of each stretch of steps."""

    def __init__(self) -> None:
        self._size = 1
        self._in_last = 0
        self._used = 0
        # Of each stretch its points (step, value), and rows of NaN for those that it does not have: a quarter of the
        # memory of tuples.
        self._points = np.full((2 * MAX_STRETCHES, MOST_POINTS, 2), math.nan)

    def add(self, step: float, value: float) -> None:
        """Adds the value at a step, which must be later than those added before."""
        if self._in_last == 0 or self._in_last == self._size:
            self._used += 1
            self._in_last = 0
        self._put(self._used - 1, [*self._at(self._used - 1), (step, value)])
        self._in_last += 1
        if self._used == 2 * MAX_STRETCHES and self._in_last == self._size:
            for stretch in range(MAX_STRETCHES):
                self._put(stretch, [*self._at(2 * stretch), *self._at(2 * stretch + 1)])
            self._points[MAX_STRETCHES:] = math.nan
            self._used = MAX_STRETCHES
            self._size *= 2
            self._in_last = self._size

    @property
    def points(self) -> list[Point]:
        return [point for stretch in range(self._used) for point in self._at(stretch)]

    def _at(self, stretch: int) -> list[Point]:
        """Returns the points of a stretch."""
        return [(step, value) for step, value in self._points[stretch].tolist() if not math.isnan(step)]

    def _put(self, stretch: int, points: list[Point]) -> None:
        """Keeps the outline of points as those of a stretch, in the place of the points that it has."""
        kept = _outline(points)
        self._points[stretch, : len(kept)] = kept
        self._points[stretch, len(kept) :] = math.nan


def _outline(points: list[Point]) -> list[Point]:
    """Returns the lowest, the highest and the first non-finite one of points, MOST_POINTS at most, in their order."""
    finite = [point for point in points if math.isfinite(point[1])]
    others = [point for point in points if not math.isfinite(point[1])][:1]
    extremes = {min(finite, key=_value), max(finite, key=_value)} if finite else set()
    return sorted([*extremes, *others])


def _value(point: Point) -> float:
    return point[1]


@dataclass
class Mean:
    """Running mean; NaN before the first value."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass
class Figures:
    """Figures of a run, accumulated up to its last step.

    Attributes:
        last_step: Number of the last step with metrics; None before the first.
        curves: Curve of each metric without a prefix in `UNCHARTED`, and of `THROUGHPUT`, by name.
        first, last: First and last value of each metric, by name.
        means: Mean over the training steps that have it, for each metric with a prefix in `UNCHARTED`.
        peaks: Highest value of each metric with prefix mem/.
        steps: Number of training steps, which are those with the metric time/step_s.
        samples: Sample responses of the first and of the last evaluation, by step.
    """

    last_step: int | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    means: dict[str, Mean] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    @staticmethod
    def read(run_dir: Path) -> Figures:
        """Accumulates the figures of a run directory from its files `metrics.jsonl` and `samples.jsonl`; a missing file
        adds nothing.

        Raises:
            RlhfError: A file is damaged.
        """
        figures = Figures()
        for line in each_step(run_dir):
            figures.add(int(line["step"]), line)
        for step, sample in each_sample(run_dir):
            figures.add_samples(step, [sample])
        return figures

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, by name, to curves, first and last values, and peaks; to means only those of a
        training step. Steps must be added in order."""
        self.last_step = max(step, self.last_step or 0)
        is_training = "time/step_s" in metrics
        self.steps += is_training
        for key, value in metrics.items():
            if key == "step":
                continue
            self.first.setdefault(key, value)
            self.last[key] = value
            if not key.startswith(UNCHARTED) or key == THROUGHPUT:
                self.curves.setdefault(key, Curve()).add(step, value)
            if key.startswith(UNCHARTED) and is_training:
                self.means.setdefault(key, Mean()).add(value)
            if key.startswith("mem/"):
                self.peaks[key] = max(value, self.peaks.get(key, 0.0))

    def add_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Adds sample responses of a step. Those of the first and of the newest step are kept."""
        if step not in self.samples:
            self.samples = dict([*self.samples.items()][:1]) | {step: []}
        self.samples[step] += samples

    def points(self, key: str) -> list[Point]:
        """Returns the points (step, value) of a metric's curve; an empty list for a metric that is not in
        `curves`."""
        return self.curves[key].points if key in self.curves else []

    def mean(self, key: str) -> float | None:
        """Returns the mean of a metric over the training steps; None for a metric that is not in `means`."""
        return self.means[key].value if key in self.means else None
