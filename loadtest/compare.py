"""Compares two results of load tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from loadtest.run import FORMAT
from loadtest.table import PERCENTILES
from reports.units import rate_text, seconds_text
from rlhf.errors import ConfigError

Json = Mapping[str, Any]

_NOT_COMPARED = ("target", "objectives", "data")


@dataclass(frozen=True)
class Difference:
    """One figure in two results: `before` and `after`, each None where the result does not have it. `is_time`: the
    figure is a time in seconds."""

    level: float
    name: str
    before: float | None
    after: float | None
    is_time: bool = False

    @property
    def change(self) -> float | None:
        """Relative change (after - before) / before; None where a figure is missing or `before` is 0."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return (self.after - self.before) / self.before


def read(path: Path) -> Json:
    """Reads a result that `--json` wrote.

    Raises:
        ConfigError: The file cannot be read, or is not a result.
    """
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--compare: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--compare: {path}: not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT or "steps" not in result:
        raise ConfigError(f"--compare: {path} is not a result of rlhf-loadtest, format {FORMAT}")
    return result


def differences(before: Json, after: Json) -> list[Difference]:
    """Returns one Difference per figure of each level that both results have, in the order of `before`."""
    theirs = {step["level"]: step for step in after["steps"]}
    pairs = [(step, theirs[step["level"]]) for step in before["steps"] if step["level"] in theirs]
    return [difference for pair in pairs for difference in _of_step(*pair)]


def differing_settings(before: Json, after: Json) -> list[str]:
    """Returns a text for each setting that differs, such as "rows: 1 and 8", since figures are then not comparable.
    Target, objectives and data are not compared."""
    ours, theirs = before["settings"], after["settings"]
    names = [name for name in ours if name not in _NOT_COMPARED and ours[name] != theirs.get(name)]
    return [f"{name}: {ours[name]} and {theirs.get(name)}" for name in names]


def table(found: list[Difference]) -> Table:
    """Makes a table of the differences for the terminal: the figures before (A) and after (B), and the change."""
    shown = Table()
    for name in ("level", "figure", "A", "B", "B over A"):
        shown.add_column(name, justify="left" if name == "figure" else "right")
    for difference in found:
        values = [_text(value, difference.is_time) for value in (difference.before, difference.after)]
        change = "" if difference.change is None else f"{difference.change:+.1%}"
        shown.add_row(f"{difference.level:g}", difference.name, *values, change)
    return shown


def _of_step(before: Json, after: Json) -> Iterator[Difference]:
    level = before["level"]
    yield Difference(level, "answered/s", before["throughput_per_s"], after["throughput_per_s"])
    yield Difference(level, "errors", sum(before["errors"].values()), sum(after["errors"].values()))
    for name in PERCENTILES:
        yield _time(level, name, before["latency_s"].get(name), after["latency_s"].get(name))
    for part in before["server_s"].keys() & after["server_s"].keys():
        means = (step["server_s"][part]["mean"] for step in (before, after))
        yield _time(level, f"service: {part}, mean", *means)


def _time(level: float, name: str, before: float | None, after: float | None) -> Difference:
    return Difference(level, name, before, after, is_time=True)


def _text(value: float | None, is_time: bool) -> str:
    if value is None:
        return "-"
    return seconds_text(value) if is_time else rate_text(value)
