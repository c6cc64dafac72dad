"""Codec of RewardService: makes text rows from columns, and columns of rewards from verdicts. The verdict on a row is
a score, a score per response token, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import json_format, struct_pb2

from controller.role_groups.codec import BatchCodec
from nccl_transfer.refs.batch import Batch, Column, LocalColumn, lengths_of
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.plans import Relay
from reports.units import counted
from rlhf.contract import Method
from rlhf.errors import InvalidRequest, RewardFailed, one_line
from rlhf.v1 import common_pb2, reward_pb2

FLOAT32_MAX = float(np.finfo(np.float32).max)
NUMBERS = ("group", "response_tokens")
"""Columns of a TextRow that are numbers; the others are texts."""
MIXED = "some rows have one score and others a score per token; all rows of a step need the same kind"


class RewardCodec(BatchCodec):
    """Encodes and decodes the messages of a reward service.

    Args:
        service: Name of the service in the config.
        ranks: Its ranks, in rank order; their text names them in errors.
        wants_text: Whether the service scores texts instead of token ids.
    """

    def __init__(self, service: str, ranks: Sequence[object], *, wants_text: bool) -> None:
        self._service = service
        self._ranks = ranks
        self._wants_text = wants_text

    def request(
        self,
        method: Method,
        header: common_pb2.Call,
        batch: Batch,
        numbers: np.ndarray,
        relays: Sequence[Relay],
        options: dict[str, Any],
    ) -> Any:
        if not self._wants_text or method.name != "ComputeReward":
            return super().request(method, header, batch, numbers, relays, options)
        return method.request(call=header, text_rows=text_rows(batch), **options)

    def rows_of(self, method: Method, responses: Sequence[Any], sizes: Sequence[int]) -> Batch:
        """Joins the rows in the responses of a call, as `BatchCodec.rows_of` does. For ComputeReward, makes columns
        `rewards` (see `rewards_of`) and `reward_errors` (see `failure_of`) from the verdicts instead.

        Raises:
            RewardFailed: A rank did not return one verdict for each row that it was sent, or some rows have one score
                and others a score per token.
        """
        if method.name != "ComputeReward":
            return super().rows_of(method, responses, sizes)
        for rank, rows, response in zip(self._ranks, sizes, responses, strict=True):
            if len(response.scores) != rows:
                raise RewardFailed(
                    f"{rank}: {counted(len(response.scores), 'verdict')} for {counted(rows, 'row')}"
                )
        scores = [score for response in responses for score in response.scores]
        errors = [failure_of(score) for score in scores]
        return Batch.of(rewards=rewards_of(scores, self._service), reward_errors=errors)

    def joined(self, name: str, chunks: Sequence[Column]) -> Column:
        """Concatenates a column of chunks, as `BatchCodec.joined` does. For `rewards`, raises RewardFailed where some
        rows have one score and others a score per token."""
        if name != "rewards":
            return super().joined(name, chunks)
        if any(isinstance(chunk, LocalColumn) and isinstance(chunk.values, Jagged) for chunk in chunks):
            chunks = [_per_token(chunk, self._service) for chunk in chunks]
        return super().joined(name, chunks)


def _per_token(rewards: Column, service: str) -> Column:
    """Returns the rewards of a chunk as scores per token. A chunk without any scored row has no kind of score and is
    converted to rows without tokens.

    Raises:
        RewardFailed: A row has one score.
    """
    assert isinstance(rewards, LocalColumn), "verdicts are in the response itself"
    if isinstance(rewards.values, np.ndarray):
        if not np.isnan(rewards.values).all():
            raise RewardFailed(f"{service}: {MIXED}")
        return LocalColumn(Jagged(np.empty(0), np.zeros(rewards.rows, np.int64)))
    return rewards


def text_rows(part: Batch) -> list[reward_pb2.TextRow]:
    """Makes one TextRow per row of a batch, from the columns that the controller holds; columns that ranks hold are
    left out.

    Raises:
        InvalidRequest: The metadata of a row is not a JSON object, or cannot be represented in a request.
    """
    local = {name: column for name, column in part.columns.items() if isinstance(column, LocalColumn)}
    columns: dict[str, list[Any]] = {
        name: np.asarray(column.values).astype(np.uint64).tolist() if name in NUMBERS else column.texts
        for name, column in local.items()
    }
    if "metadata" in columns:
        # The samples of a prompt share its metadata: each distinct text is parsed once.
        parsed = {text: _struct(text) for text in set(columns["metadata"])}
        columns["metadata"] = [parsed[text] for text in columns["metadata"]]
    rows = zip(*columns.values(), strict=True)
    return [reward_pb2.TextRow(**dict(zip(columns, values, strict=True))) for values in rows]


def rewards_of(scores: list[reward_pb2.RowScore], service: str) -> np.ndarray | Jagged[np.ndarray]:
    """Makes the values of column rewards from verdicts: [rows] float64, or per response token (jagged). A row that
    was not scored has NaN, or no tokens.

    Raises:
        RewardFailed: Some rows have one score and others a score per token.
    """
    failed = [bool(failure_of(score)) for score in scores]
    kinds = {score.WhichOneof("verdict") for score, is_bad in zip(scores, failed, strict=True) if not is_bad}
    if kinds == {"token_scores"}:
        per_row = [
            np.asarray([] if is_bad else score.token_scores.scores, np.float64)
            for score, is_bad in zip(scores, failed, strict=True)
        ]
        return Jagged(np.concatenate(per_row), np.asarray([len(row) for row in per_row], np.int64))
    if kinds - {"score"}:
        raise RewardFailed(f"{service}: {MIXED}")
    values = (np.nan if is_bad else score.score for score, is_bad in zip(scores, failed, strict=True))
    return np.fromiter(values, np.float64, len(scores))


def all_scored(rewards: Column, errors: Column, service: str) -> Column:
    """Returns the column `rewards` if every row was scored.

    Raises:
        RewardFailed: Rows could not be scored; the text has their number and the cause of the first.
    """
    assert isinstance(errors, LocalColumn), "verdicts are in the response itself"
    causes = {row: cause for row, cause in enumerate(errors.texts) if cause}
    if causes:
        raise not_scored(service, causes, len(errors.texts))
    return rewards


def not_scored(name: str, causes: Mapping[int, str], rows: int) -> RewardFailed:
    """Returns, and does not raise, the error of a reward that could not score some of `rows` rows, with their number
    and the cause of the first.

    Args:
        name: Name of the reward.
        causes: Why a row could not be scored, by the index of the row; at least one.
        rows: Number of rows.
    """
    row, cause = next(iter(causes.items()))
    told = one_line(cause.replace("\n", " "))
    return RewardFailed(
        f"{name}: {len(causes)} of {counted(rows, 'row')} could not be scored; row {row}: {told}"
    )


def first_causes(columns: Sequence[Column]) -> Column:
    """Returns column reward_errors in which a row whose episode has failed has the cause of that.

    Args:
        columns: Columns reward_errors and environment_error.
    """
    errors, causes = columns
    assert isinstance(errors, LocalColumn), "verdicts are in the response itself"
    assert isinstance(causes, LocalColumn), "the controller plays the episodes"
    return LocalColumn([cause or error for error, cause in zip(errors.texts, causes.texts, strict=True)])


def token_counts(columns: Sequence[Column]) -> Column:
    """Returns column response_tokens, the number of tokens of each response that the policy sampled.

    Args:
        columns: A column with a value per such token.
    """
    return LocalColumn(lengths_of(columns[0]))


def miscounted(columns: Sequence[Column]) -> Column:
    """Returns column reward_errors with a cause for each row whose token scores are not one per response token that the
    policy sampled.

    Args:
        columns: Columns rewards, reward_errors and one with a value per such token.
    """
    rewards, errors, responses = columns
    assert isinstance(rewards, LocalColumn), "verdicts are in the response itself"
    assert isinstance(errors, LocalColumn), "verdicts are in the response itself"
    if not isinstance(rewards.values, Jagged):
        return errors
    causes = [
        cause or (f"{given} token scores for a response of {count} tokens" if given != count else "")
        for cause, given, count in zip(
            errors.texts, rewards.values.lengths, lengths_of(responses), strict=True
        )
    ]
    return LocalColumn(causes)


def failure_of(score: reward_pb2.RowScore) -> str:
    """Returns the reason that a verdict has no reward to train on, as text: its error, "no verdict", or a score that is
    not a finite float32. Empty where the verdict has a usable score."""
    verdict = score.WhichOneof("verdict")
    if verdict in (None, "error"):
        return score.error or "no verdict"
    values = [score.score] if verdict == "score" else score.token_scores.scores
    bad = [value for value in values if not abs(value) <= FLOAT32_MAX]
    return f"score {bad[0]:g} is not a float32 number" if bad else ""


def _struct(text: str) -> struct_pb2.Struct:
    """Parses a JSON object into a protobuf Struct.

    Raises:
        InvalidRequest: The text is not a JSON object, or a Struct cannot represent it.
    """
    try:
        return json_format.Parse(text, struct_pb2.Struct())
    except json_format.ParseError as error:
        raise InvalidRequest(f"metadata {text[:80]!r}: {error}") from None
