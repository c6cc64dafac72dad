"""Metrics and samples of a run, written line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from controller.tracking.run_directory import AppendFile, json_text, read_json_lines
from controller.tracking.tensorboard import EventFile

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class MetricsWriter:
    """Appends the numbers of each step to `metrics.jsonl`, and to TensorBoard events under `tensorboard/`.

    A line is `{"step": 3, "actor/loss": 0.25, ...}`: keys sorted, values as the repr of a float, those that
    are not finite as "NaN", "Infinity" and "-Infinity" (see `json_text`). Two runs with equal numbers write
    equal text; only keys under `time/` and `mem/` may differ between runs of one seed.

    After an error of `log` a writer can only be closed.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises RlhfError where the files cannot be created."""
        self._lines = AppendFile(run_dir, METRICS_FILE)
        self._events = EventFile(run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the numbers of a step; they are on the disk when this returns.

        Args:
            step: 0 is before training.
            metrics: by name; numpy scalars are fine.

        Raises:
            ValueError: a negative step, or a metric named "step".
            RlhfError: the disk failed; one line with directory and file.
        """
        if step < 0 or "step" in metrics:
            raise ValueError(f"step {step} must not be negative, nor a metric be named 'step'")
        numbers = {key: float(metrics[key]) for key in sorted(metrics)}
        self._lines.append(_line({"step": step, **numbers}))
        self._events.log(step, numbers)

    def check(self) -> None:
        """Raises RlhfError where the metrics were deleted."""
        self._lines.check()

    def close(self) -> None:
        """Closes the files; may be called again."""
        self._lines.close()
        self._events.close()


@dataclass(frozen=True)
class Sample:
    """One response as text."""

    prompt: str
    response: str
    ground_truth: str
    reward: float
    """Score of the reward service."""


class SamplesWriter:
    """Appends sample responses to `samples.jsonl`, one line each: step and the fields of `Sample`."""

    def __init__(self, run_dir: Path) -> None:
        """Raises RlhfError where the file cannot be created."""
        self._lines = AppendFile(run_dir, SAMPLES_FILE)

    def log(self, step: int, rows: Sequence[Sample]) -> None:
        """Writes the samples of a step; they are on the disk when this returns.

        Raises:
            RlhfError: the disk failed; one line with directory and file.
        """
        self._lines.append(b"".join(_line({"step": step, **asdict(row)}) for row in rows))

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._lines.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl`, as `each_step`."""
    return list(each_step(run_dir))


def each_step(run_dir: Path) -> Iterator[dict[str, float]]:
    """The lines of `metrics.jsonl` one after the other, `step` among the keys; a line cut off at the end is left out.

    Raises:
        RlhfError: the file is damaged elsewhere.
    """
    for line in read_json_lines(run_dir / METRICS_FILE):
        yield {key: float(value) for key, value in line.items()}


def read_samples(run_dir: Path) -> list[tuple[int, Sample]]:
    """The samples of `samples.jsonl`, as `each_sample`."""
    return list(each_sample(run_dir))


def each_sample(run_dir: Path) -> Iterator[tuple[int, Sample]]:
    """The samples of `samples.jsonl` with their steps, one after the other; a line cut off at the end is left out.

    Raises:
        RlhfError: the file is damaged elsewhere.
    """
    for line in read_json_lines(run_dir / SAMPLES_FILE):
        texts = line["prompt"], line["response"], line["ground_truth"]
        yield int(line["step"]), Sample(*texts, float(line["reward"]))


def _line(obj: Mapping[str, object]) -> bytes:
    return json_text(obj).encode() + b"\n"
