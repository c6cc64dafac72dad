"""Observers of a run: what gets its records beside the files of its directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controller.role_groups.dataflow import CallRecord
from controller.tracking.metrics import Sample


class Observer:
    """Gets the records of a run after they were written to its files. The methods return at once and raise nothing, so
    that an observer changes no run. Default: they do nothing."""

    def calls(self, step: int, records: Iterable[CallRecord], rows: int) -> None:
        """Takes the calls of a step that has ended, and the number of rows that it trained on; those of the evaluation
        after a step with 0 rows."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Takes sample responses of the evaluation after a step, before the metrics of that step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a finished step by name; step 0 is the evaluation before training."""

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Takes the figures of a run that ends."""
