"""Interface of every kind of reward: rows in, a verdict per row out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from rlhf.errors import InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2
from services.runtime.worker import CallContext, CallResult, CallRows


class GaveUp(Exception):
    """A verifier gives up on a response, which is thereby judged: it is wrong. The text is the cause, in one word, by
    which such rows are counted."""


class Scorer(ABC):
    """Scores rows of one input form.

    Attributes:
        input_form: What Describe says of it.
        vocabulary_hash: Of the tokenizer whose ids it reads; empty for text.
        score_range: Lowest and highest score it gives; None where they are not known.
        metrics: Of the rows scored last, (sum, count) by name.
    """

    input_form = worker_pb2.INPUT_FORM_TEXT
    vocabulary_hash = ""
    score_range: tuple[float, float] | None = None
    metrics: Mapping[str, tuple[float, float]] = {}

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        """One verdict per text row."""
        raise InvalidRequest("this reward reads token ids: send a batch with prompt_ids and response_ids")

    def score_tokens(self, rows: CallRows, call: CallContext) -> list[reward_pb2.RowScore]:
        """One verdict per row of "prompt_ids" and "response_ids"."""
        raise InvalidRequest("this reward reads text: send text_rows")

    @abstractmethod
    def kind(self) -> str:
        """Name of the kind in Describe."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Lets go of what it holds; called on the thread that scores, and nothing is scored after."""


def score_request(
    scorer: Scorer, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
) -> CallResult:
    """Answers ComputeReward: verdicts on its text rows, or on its batch."""
    if not request.HasField("batch"):
        scores = scorer.score_texts(request.text_rows, call)
        return CallResult(fields={"scores": scores}, metrics=scorer.metrics)
    if request.text_rows:
        raise InvalidRequest("compute_reward: give text_rows or a batch, not both")
    return CallResult(fields={"scores": scorer.score_tokens(rows, call)})


def metadata_of(row: reward_pb2.TextRow) -> dict[str, Any]:
    """The metadata of a row. Raises InvalidRequest where a number in it is not finite, which JSON has no word for."""
    try:
        return json_format.MessageToDict(row.metadata)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"the row's metadata cannot be read: {error}") from error


def gave_up_metrics(causes: Mapping[str, int], rows: int) -> dict[str, tuple[float, float]]:
    """Share of the rows on whose responses a verifier gave up: in all, and by cause."""
    counts = {cause: count for cause, count in sorted(causes.items()) if cause}
    by_cause = {f"gave_up/{cause}": (float(count), float(rows)) for cause, count in counts.items()}
    return {"gave_up": (float(sum(counts.values())), float(rows)), **by_cause} if rows else {}


def row_score(verdict: object) -> reward_pb2.RowScore:
    """A verdict as a message: a finite number, a sequence of them, or else an error."""
    if isinstance(verdict, str | bytes):
        return reward_pb2.RowScore(error=f"score is text: {verdict!r}")
    try:
        values = [float(x) for x in verdict] if isinstance(verdict, Sequence) else [float(verdict)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return reward_pb2.RowScore(error=f"score is not a number: {verdict!r}")
    if not all(map(math.isfinite, values)):
        return reward_pb2.RowScore(error=f"score is not finite: {verdict!r}")
    if isinstance(verdict, Sequence):
        return reward_pb2.RowScore(token_scores=reward_pb2.TokenScores(scores=values))
    return reward_pb2.RowScore(score=values[0])
