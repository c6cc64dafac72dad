"""One training step, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from client.session import StepContext
from controller.advantage import Advantage
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import results
from rlhf.errors import InvalidRequest


class Step:
    """One training step.

    Args:
        context: The step as its calls see it.
        draw: The next prompts of the data, each repeated for its samples, and their groups.
        pretraining: See below.

    Attributes:
        number: From 1.
        prompts: The step's prompts, each repeated for its samples.
        groups: Column "group" of the same rows [rows] int64: the number of the row's prompt, unique in the run.
        pretraining: Column "pretrain_text" of the same rows, where the config has such texts; else no column.
        metrics: Metrics that the algorithm adds.
    """

    def __init__(
        self,
        context: StepContext,
        draw: Callable[[], tuple[FutureBatch, FutureBatch]],
        pretraining: FutureBatch,
    ) -> None:
        self.number = context.number
        self.context = context
        self._draw = draw
        self.prompts, self.groups = self._next()
        self.pretraining = pretraining.of_step(context)
        self.metrics: dict[str, float] = {}
        self.records: list[CallRecord] = []
        self.batch = self.prompts

    def rounds(self, most: int) -> Iterator[FutureBatch]:
        """At most `most` batches of prompts with their groups, each of a step's size: those of the step, then further
        ones of the data."""
        yield self.prompts | self.groups
        for _ in range(most - 1):
            prompts, groups = self._next()
            yield prompts | groups

    def compute(self, function: Callable[..., Advantage], *columns: Any, **options: Any) -> FutureBatch:
        """The columns of an advantage, computed by a pure function of numbers; its metrics become those of the step.

        Raises:
            InvalidRequest: The function raised ValueError.
        """
        try:
            result = function(*columns, **options)
        except ValueError as error:
            raise InvalidRequest(f"compute_advantage, step {self.number}: {error}") from error
        self.metrics |= result.metrics
        return FutureBatch.of(**result.columns).of_step(self.context)

    def finish(self, *batches: FutureBatch) -> None:
        """Waits for every call that made these batches; the first is the one that the step trained on."""
        self.batch = batches[0]
        self.records = results(list(dict.fromkeys(call for batch in batches for call in batch.calls)))

    def _next(self) -> tuple[FutureBatch, FutureBatch]:
        prompts, groups = self._draw()
        return prompts.of_step(self.context), groups.of_step(self.context)
