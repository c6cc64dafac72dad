"""A reward function that is ready to score: how its rows are grouped, and what becomes of its results and errors."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import InvalidRequest, encodable, full_traceback
from rlhf.v1 import reward_pb2
from services.reward.conventions import TOKENS
from services.reward.functions import Unit, find_function, is_awaited, unit_of, wants_tokens
from services.reward.groups import group_fault, groups_of
from services.reward.scorers.base import GaveUp, metadata_of, row_score
from services.reward.scorers.extras import Metrics, extra_metrics

_PACKAGE = Path(__file__).parents[1]
_logged: set[tuple[str, int]] = set()
"""File and line of each exception whose traceback was logged."""


@dataclass(frozen=True)
class Scored:
    """Scores of the rows of one unit.

    Attributes:
        scores: One score per row.
        cause: Cause for which a verifier gave up on the response, which then scores 0; else "".
        metrics: Metrics of the function's further numbers.
    """

    scores: Sequence[reward_pb2.RowScore]
    cause: str = ""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function with its options.

    Attributes:
        name: Name of the function, for errors.
        function: The function, as `find_function` returns it.
        unit: What one call of it scores.
        is_async: Whether it returns awaitables, so that `score_async` is called in place of `score`.
        wants_tokens: Whether it is given the number of tokens of the responses too.
    """

    name: str
    function: Callable[..., Any]
    unit: Unit = "row"
    is_async: bool = False
    wants_tokens: bool = False

    @classmethod
    def load(cls, name: str, options: Mapping[str, Any]) -> LoadedFunction:
        """Finds a function by name. Raises ConfigError as `find_function` does."""
        return cls(name, find_function(name, options), unit_of(name), is_awaited(name), wants_tokens(name))

    def score(self, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        """Scores the rows of a unit, at least one. An exception of the function, or a result that is not as it should
        be, becomes the error of every row; a verdict that is no score becomes the error of its row."""
        try:
            return self._read(rows, self.function(*self._arguments(rows), **self._tokens(rows)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything; the rows carry it
            return self._failed(rows, error)

    async def score_async(self, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        """As `score`, for a function that returns awaitables."""
        try:
            return self._read(rows, await self.function(*self._arguments(rows), **self._tokens(rows)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            return self._failed(rows, error)

    def units_of(self, rows: Sequence[reward_pb2.TextRow], *, whole_batch: bool) -> list[list[int]]:
        """Returns the indices of the rows of each unit.

        Args:
            rows: The rows of a call.
            whole_batch: For a function of batches, whether all rows are one unit; else each row is one.
        """
        if self.unit == "group":
            return groups_of(rows)
        if self.unit == "batch" and whole_batch:
            return [list(range(len(rows)))] if rows else []
        return [[index] for index in range(len(rows))]

    def _arguments(self, rows: Sequence[reward_pb2.TextRow]) -> tuple[Any, ...]:
        first = rows[0]
        if self.unit == "row":
            return first.prompt, first.response, first.ground_truth, metadata_of(first)
        responses = [row.response for row in rows]
        if self.unit == "group":
            if fields := group_fault(rows):
                raise InvalidRequest(f"the rows of group {first.group} differ in {fields}")
            return first.prompt, responses, first.ground_truth, metadata_of(first)
        truths = [row.ground_truth for row in rows]
        return [row.prompt for row in rows], responses, truths, [metadata_of(row) for row in rows]

    def _tokens(self, rows: Sequence[reward_pb2.TextRow]) -> dict[str, Any]:
        """Returns the argument `TOKENS` of a function that wants it. Raises InvalidRequest where a row has none."""
        if not self.wants_tokens:
            return {}
        if not all(row.HasField("response_tokens") for row in rows):
            raise InvalidRequest(f"{self.name} needs {TOKENS}, which the row does not have")
        counts = [row.response_tokens for row in rows]
        return {TOKENS: counts[0] if self.unit == "row" else counts}

    def _read(self, rows: Sequence[reward_pb2.TextRow], result: Any) -> Scored:
        verdicts = [result] if self.unit == "row" else self._one_per_row(rows, result)
        scores, numbers = [], []
        for verdict in verdicts:
            if not isinstance(verdict, Mapping):
                scores.append(row_score(verdict, by_token=self.wants_tokens))
            elif "score" not in verdict:
                given = ", ".join(sorted(map(str, verdict))) or "nothing"
                scores.append(
                    reward_pb2.RowScore(error=encodable(f"{self.name} returned no score, only: {given}"))
                )
            else:
                scores.append(row_score(verdict["score"], by_token=self.wants_tokens))
                numbers += [] if scores[-1].error else [verdict]
        return Scored(scores, metrics=extra_metrics(numbers))

    def _one_per_row(self, rows: Sequence[reward_pb2.TextRow], result: Any) -> list[Any]:
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise InvalidRequest(
                f"{self.name} returned {type(result).__name__}, not a sequence with one score per response"
            )
        verdicts = list(result)
        if len(verdicts) != len(rows):
            raise InvalidRequest(f"{self.name} returned {len(verdicts)} scores for {len(rows)} responses")
        return verdicts

    def _failed(self, rows: Sequence[reward_pb2.TextRow], error: BaseException) -> Scored:
        """Returns an exception as score 0 with its cause, if it is GaveUp; else as the error of each row. Logs its
        traceback, in each process once for each line of code that raises."""
        if isinstance(error, GaveUp) and self.unit == "row":
            return Scored([reward_pb2.RowScore(score=0.0)], str(error))
        if isinstance(error, InvalidRequest):
            return Scored([reward_pb2.RowScore(error=encodable(str(error)))] * len(rows))
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        if frames[-1] not in _logged:
            _logged.add(frames[-1])
            logging.error("%s cannot score a row:\n%s", self.name, encodable(full_traceback(error)))
        cause = encodable(f"{self.name} raised {type(error).__name__}: {error}{_place(frames)}")
        return Scored([reward_pb2.RowScore(error=cause)] * len(rows))


def _place(frames: Iterable[tuple[str, int]]) -> str:
    """Returns file and line of the first frame of a traceback that is not in package `services`, for messages: the line
    of a user's function that raised, or called what raised. Empty where there is none."""
    for path, line in frames:
        if _PACKAGE not in Path(path).parents:
            return f" ({Path(path).name}:{line})"
    return ""
