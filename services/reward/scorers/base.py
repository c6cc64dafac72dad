"""The interface of every kind of reward: rows in, one verdict per row out."""

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
    """A verifier gives up on a response, which therefore scores 0. The text is the cause, in one word; rows are counted
    by it."""


class Scorer(ABC):
    """Scores rows of one input form.

    Attributes:
        input_form: Form of the rows that it reads, for Describe.
        vocabulary_hash: Hash of the tokenizer whose ids it reads; "" for text.
        score_range: Lowest and highest score; None where they are not known.
        metrics: (sum, count) by name, of the rows scored last.
    """

    input_form = worker_pb2.INPUT_FORM_TEXT
    vocabulary_hash = ""
    score_range: tuple[float, float] | None = None
    metrics: Mapping[str, tuple[float, float]] = {}

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores text rows: one verdict per row, in row order.

        Raises:
            CallCancelled, DeadlineExceeded: As `call.check`.
            InvalidRequest: The reward does not read text.
        """
        raise InvalidRequest("this reward reads token ids: send a batch with prompt_ids and response_ids")

    def score_tokens(self, rows: CallRows, call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores columns "prompt_ids" and "response_ids": verdicts in row order. Raises as `score_texts`."""
        raise InvalidRequest("this reward reads text: send text_rows")

    @abstractmethod
    def kind(self) -> str:
        """Name of the kind in Describe."""

    def close(self) -> None:  # noqa: B027 - most scorers hold nothing
        """Frees processes and connections. Called on the thread that scores; nothing is scored afterwards."""


def score_request(
    scorer: Scorer, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
) -> CallResult:
    """Answers ComputeReward with verdicts on its text rows or on its batch.

    Raises:
        InvalidRequest: The request has both, or rows in a form that the scorer does not read.
    """
    if not request.HasField("batch"):
        scores = scorer.score_texts(request.text_rows, call)
        return CallResult(fields={"scores": scores}, metrics=scorer.metrics)
    if request.text_rows:
        raise InvalidRequest("compute_reward: give text_rows or a batch, not both")
    return CallResult(fields={"scores": scorer.score_tokens(rows, call)})


def metadata_of(row: reward_pb2.TextRow) -> dict[str, Any]:
    """The metadata of a row as a dictionary. Raises InvalidRequest where a number in it is not finite."""
    try:
        return json_format.MessageToDict(row.metadata)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"the row's metadata cannot be read: {error}") from error


def gave_up_metrics(causes: Mapping[str, int], rows: int) -> dict[str, tuple[float, float]]:
    """Metrics: the share of rows on whose responses a verifier gave up, in all and by cause.

    Args:
        causes: Number of rows by cause; "" where the verifier did not give up.
    """
    counts = {cause: count for cause, count in sorted(causes.items()) if cause}
    by_cause = {f"gave_up/{cause}": (float(count), float(rows)) for cause, count in counts.items()}
    return {"gave_up": (float(sum(counts.values())), float(rows)), **by_cause} if rows else {}


def row_score(verdict: object) -> reward_pb2.RowScore:
    """The message of a function's result: a score, scores of tokens, or an error where one is no finite number."""
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
