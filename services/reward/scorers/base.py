"""The interface of every kind of reward: a scorer takes rows and returns one RowScore per row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from google.protobuf import json_format

from rlhf.errors import InvalidRequest, encodable
from rlhf.v1 import reward_pb2, worker_pb2
from services.runtime.worker import CallContext, CallResult, CallRows

MOST_TEXT_ROWS = 1 << 20
"""Most text rows of one call."""
MAX_SHOWN = 200
"""Maximum number of characters of a verdict that an error message repeats."""


class GaveUp(Exception):
    """A verifier gives up on a response, which then scores 0. The message is the cause in one word, such as
    "too_long", by which metrics count rows."""


class Scorer(ABC):
    """Base class of scorers. A subclass reads one form of rows, text or token ids, and overrides `score_texts` or
    `score_tokens`.

    Attributes:
        input_form: Form of the rows that the scorer reads, a value of the enum InputForm. Default: text.
        vocabulary_hash: Hash of the vocabulary of the token ids that it reads; "" (default) if it reads text.
        scores_groups: Whether a score may depend on all rows of a group, those with the same `TextRow.group`. Default:
            False.
        score_range: Lowest and highest score. Default None: unknown.
        metrics: Metrics of the rows scored last, as (sum, count) by name.
    """

    input_form = worker_pb2.INPUT_FORM_TEXT
    vocabulary_hash = ""
    scores_groups = False
    score_range: tuple[float, float] | None = None
    metrics: Mapping[str, tuple[float, float]] = {}

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores text rows; returns one RowScore per row, in row order.

        Raises:
            CallCancelled, DeadlineExceeded: As raised by `call.check`.
            InvalidRequest: The reward does not read text, as it is unless a subclass overrides this method.
        """
        raise InvalidRequest("this reward reads token ids: send a batch with prompt_ids and response_ids")

    def score_tokens(self, rows: CallRows, call: CallContext) -> list[reward_pb2.RowScore]:
        """Scores rows of token ids, columns "prompt_ids" and "response_ids"; returns one RowScore per row, in row
        order.

        Raises:
            CallCancelled, DeadlineExceeded: As raised by `call.check`.
            InvalidRequest: The reward does not read token ids, as it is unless a subclass overrides this method.
        """
        raise InvalidRequest("this reward reads text: send text_rows")

    @abstractmethod
    def kind(self) -> str:
        """Returns the name of the kind of reward that Describe shows, such as "judge MODEL"."""

    def close(self) -> None:  # noqa: B027 - most scorers hold nothing
        """Frees processes and connections; does nothing unless overridden. Called last, on the thread that scores."""


def score_request(
    scorer: Scorer, rows: CallRows, request: reward_pb2.ComputeRewardRequest, call: CallContext
) -> CallResult:
    """Handles the ComputeReward RPC: scores the request's text rows, or the rows of its batch. Returns the scores, one
    RowScore per row, and for text rows the scorer's metrics.

    Args:
        scorer: The scorer.
        rows: Rows of the request's batch, fetched.
        request: The request.
        call: Context of the call.

    Raises:
        InvalidRequest: The request has more than MOST_TEXT_ROWS text rows, text rows and a batch, or rows in a form
            that the scorer does not read.
    """
    if len(request.text_rows) > MOST_TEXT_ROWS:
        raise InvalidRequest(
            f"compute_reward: {len(request.text_rows)} text rows; at most {MOST_TEXT_ROWS} are allowed in a call"
        )
    if not request.HasField("batch"):
        scores = scorer.score_texts(request.text_rows, call)
        return CallResult(fields={"scores": scores}, metrics=scorer.metrics)
    if request.text_rows:
        raise InvalidRequest("compute_reward: give text_rows or a batch, not both")
    return CallResult(fields={"scores": scorer.score_tokens(rows, call)})


def metadata_of(row: reward_pb2.TextRow) -> dict[str, Any]:
    """Returns the metadata of a row as a dictionary.

    Raises:
        InvalidRequest: A number in the metadata is not finite.
    """
    try:
        return json_format.MessageToDict(row.metadata)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"the row's metadata cannot be read: {error}") from error


def gave_up_metrics(causes: Mapping[str, int], rows: int) -> dict[str, tuple[float, float]]:
    """Returns metrics, as (sum, count) by name: the share of rows on whose responses a verifier gave up, in total
    (`gave_up`) and by cause (`gave_up/CAUSE`).

    Args:
        causes: Number of rows by cause, with "" for rows on which the verifier did not give up.
        rows: Number of all rows.
    """
    counts = {cause: count for cause, count in sorted(causes.items()) if cause}
    by_cause = {f"gave_up/{cause}": (float(count), float(rows)) for cause, count in counts.items()}
    return {"gave_up": (float(sum(counts.values())), float(rows)), **by_cause} if rows else {}


def row_score(verdict: object, *, by_token: bool = False) -> reward_pb2.RowScore:
    """Converts the result of a reward function to a RowScore: a score, scores of tokens, or an error if one of them
    is not a finite number. A sequence is scores of tokens, and so is an array or tensor of one dimension, unless it has
    one number: a score, as models return it.

    Args:
        verdict: The result.
        by_token: Whether an array of one number is the score of a response of one token. Default: False.
    """
    if isinstance(verdict, str | bytes):
        return reward_pb2.RowScore(error=f"score is text: {shown(verdict)}")
    if _is_vector(verdict):
        numbers = verdict.tolist()
        verdict = numbers if by_token or len(numbers) != 1 else numbers[0]
    try:
        values = [float(x) for x in verdict] if isinstance(verdict, Sequence) else [float(verdict)]  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return reward_pb2.RowScore(error=f"score is not a number: {shown(verdict)}")
    if not all(map(math.isfinite, values)):
        return reward_pb2.RowScore(error=f"score is not finite: {shown(verdict)}")
    if isinstance(verdict, Sequence):
        return reward_pb2.RowScore(token_scores=reward_pb2.TokenScores(scores=values))
    return reward_pb2.RowScore(score=values[0])


def _is_vector(value: Any) -> TypeGuard[Any]:
    """Returns whether a value is an array or tensor, of whatever library, of one dimension."""
    shape = getattr(value, "shape", ())
    return isinstance(shape, tuple) and len(shape) == 1 and hasattr(value, "tolist")


def shown(verdict: object) -> str:
    text = encodable(repr(verdict))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
