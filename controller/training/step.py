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
    """One training step, as an algorithm sees it.

    Args:
        context: The step in the session, which its calls belong to.
        draw: Function that draws the next prompts, each repeated for its samples, and their groups.
        pretraining: See Attributes.

    Attributes:
        number: Number of the step, from 1.
        context: The step in the session, which its calls belong to.
        prompts: Prompts of the step, each repeated rollout.samples_per_prompt times. Column "prompt_number" [rows]
            int64 is the number of each row's prompt, unique in the run, by which a reward that scores groups finds the
            responses to a prompt.
        groups: Column "group" [rows] int64 of the same rows, with the same numbers as "prompt_number".
        pretraining: Column "pretrain_text" of the same rows; no column if the config has no such texts.
        metrics: Metrics that the algorithm adds to the step, by name.
        records: Records of the step's calls, after `finish`.
        batch: Batch that the step trained on, after `finish`.
        is_last: Whether the run ends after this step although `run.steps` is larger; see `stop`.
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
        self.is_last = False

    def rounds(self, most: int) -> Iterator[FutureBatch]:
        """Yields at most `most` batches of prompts with column "group", each with the size of a step: first the
        prompts of the step, then newly drawn ones."""
        yield self.prompts | self.groups
        for _ in range(most - 1):
            prompts, groups = self._next()
            yield prompts | groups

    def compute(self, function: Callable[..., Advantage], *columns: Any, **options: Any) -> FutureBatch:
        """Calls a function that computes advantages, adds its metrics to those of the step, and returns its columns.

        Args:
            function: Function that returns an `Advantage`.
            columns: Positional arguments of the function.
            options: Keyword arguments of the function.

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
        """Waits for all calls that made these batches, and sets `batch` to the first of them, which must be the one
        that the step trained on, and `records` to the records of the calls. Must be called at the end of each step.
        Raises the error of the first call that fails."""
        self.batch = batches[0]
        self.records = results(list(dict.fromkeys(call for batch in batches for call in batch.calls)))

    def stop(self) -> None:
        """Makes this step the last of the run: `Run.steps` evaluates after it and ends. The step has to be finished
        all the same."""
        self.is_last = True

    def _next(self) -> tuple[FutureBatch, FutureBatch]:
        prompts, groups = self._draw()
        return prompts.of_step(self.context), groups.of_step(self.context)
