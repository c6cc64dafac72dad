"""Writers and readers of the metrics and sample responses of a run: `metrics.jsonl` and `samples.jsonl`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from controller.tracking.run_directory import AppendFile, json_text, read_json_lines
from controller.tracking.tensorboard import EventFile
from rlhf.errors import InvalidRequest

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class MetricsWriter:
    """Writes the metrics of each step to `metrics.jsonl`, and to TensorBoard events below `tensorboard/`.

    A line is `{"step": 3, "actor/loss": 0.25, ...}`: keys sorted, values as the repr of a float, and values that are
    not finite as "NaN", "Infinity" and "-Infinity" (see `json_text`). Two runs with equal numbers write equal text;
    docs/metrics.md has those that differ between runs of one seed.

    After an error of `log` a writer can only be closed.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises RlhfError where the files cannot be created."""
        with contextlib.ExitStack() as opened:
            self._lines = opened.enter_context(contextlib.closing(AppendFile(run_dir, METRICS_FILE)))
            self._events = EventFile(run_dir)
            opened.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step, and returns when they are on the disk.

        Args:
            step: Number of the step; 0 is the evaluation before training.
            metrics: Metrics by name; numpy scalars are allowed.

        Raises:
            ValueError: The step is negative, or a metric is named "step".
            InvalidRequest: A metric is no number.
            RlhfError: Writing failed; the text is one line with directory, reason and file.
        """
        if step < 0 or "step" in metrics:
            raise ValueError(f"step {step} must not be negative, nor a metric be named 'step'")
        numbers = {key: _number(key, metrics[key]) for key in sorted(metrics)}
        self._lines.append(_line({"step": step, **numbers}))
        self._events.log(step, numbers)

    def check(self) -> None:
        """Raises RlhfError where `metrics.jsonl` was deleted or replaced."""
        self._lines.check()

    def close(self) -> None:
        """Closes the files; may be called again."""
        self._lines.close()
        self._events.close()


def _number(name: str, value: float) -> float:
    """Returns the value of a metric as a float. Raises InvalidRequest where it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidRequest(f"metric {name!r} has to be a number (given: {value!r:.80})") from None


@dataclass(frozen=True)
class Sample:
    """Sample response of an evaluation, with its prompt, as text."""

    prompt: str
    response: str
    ground_truth: str
    reward: float
    """Score of the reward service."""
    source: str = ""
    """Label of the prompt's source, with `data.sources`."""

    @property
    def fields(self) -> dict[str, str | float]:
        """The fields by name, without `source` where it is empty."""
        return {name: value for name, value in asdict(self).items() if name != "source" or value}


class SamplesWriter:
    """Writes sample responses to `samples.jsonl`, one per line: step and `Sample.fields`."""

    def __init__(self, run_dir: Path) -> None:
        """Raises RlhfError where the file cannot be created."""
        self._lines = AppendFile(run_dir, SAMPLES_FILE)

    def log(self, step: int, rows: Sequence[Sample]) -> None:
        """Writes the samples of a step, and returns when they are on the disk.

        Raises:
            RlhfError: Writing failed; the text is one line with directory, reason and file.
        """
        self._lines.append(b"".join(_line({"step": step, **row.fields}) for row in rows))

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._lines.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Returns the metrics of each line of `metrics.jsonl`, by name, `step` included; an empty list where the file is
    missing. Raises RlhfError where a line is damaged; an incomplete last line is skipped."""
    return list(each_step(run_dir))


def each_step(run_dir: Path) -> Iterator[dict[str, float]]:
    """Yields the metrics of each line of `metrics.jsonl`, by name; `step` is one of the keys. An incomplete last line
    is skipped; a missing file yields nothing.

    Raises:
        RlhfError: Another line is damaged.
    """
    for line in read_json_lines(run_dir / METRICS_FILE):
        yield {key: float(value) for key, value in line.items()}


def each_sample(run_dir: Path) -> Iterator[tuple[int, Sample]]:
    """Yields (step, sample) for each line of `samples.jsonl`. An incomplete last line is skipped; a missing file
    yields nothing.

    Raises:
        RlhfError: Another line is damaged.
    """
    for line in read_json_lines(run_dir / SAMPLES_FILE):
        texts = line["prompt"], line["response"], line["ground_truth"]
        yield int(line["step"]), Sample(*texts, float(line["reward"]), line.get("source", ""))


def _line(obj: Mapping[str, object]) -> bytes:
    return json_text(obj).encode() + b"\n"
