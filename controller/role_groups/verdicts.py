"""Rows and verdicts of RewardService as messages: text rows from columns, columns from scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import json_format, struct_pb2

from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest, RewardFailed
from rlhf.v1 import reward_pb2

FLOAT32_MAX = float(np.finfo(np.float32).max)


def text_rows(part: Batch) -> list[reward_pb2.TextRow]:
    columns: dict[str, list[Any]] = {
        name: column.texts for name, column in part.columns.items() if isinstance(column, LocalColumn)
    }
    if "metadata" in columns:
        # The samples of a prompt share its metadata: each distinct text is parsed once.
        parsed = {text: _struct(text) for text in set(columns["metadata"])}
        columns["metadata"] = [parsed[text] for text in columns["metadata"]]
    rows = zip(*columns.values(), strict=True)
    return [reward_pb2.TextRow(**dict(zip(columns, values, strict=True))) for values in rows]


def rewards_of(scores: list[reward_pb2.RowScore], service: str) -> np.ndarray | Jagged[np.ndarray]:
    """The verdicts as one column; every row that was scored has to have one of the same kind. Not a number, or no
    tokens, where a row was not."""
    failed = [bool(failure_of(score)) for score in scores]
    kinds = {score.WhichOneof("verdict") for score, is_bad in zip(scores, failed, strict=True) if not is_bad}
    if kinds == {"token_scores"}:
        per_row = [
            np.asarray([] if is_bad else score.token_scores.scores, np.float64)
            for score, is_bad in zip(scores, failed, strict=True)
        ]
        return Jagged(np.concatenate(per_row), np.asarray([len(row) for row in per_row], np.int64))
    if kinds - {"score"}:
        raise RewardFailed(f"{service}: some rows have one score and others a score per token")
    values = (np.nan if is_bad else score.score for score, is_bad in zip(scores, failed, strict=True))
    return np.fromiter(values, np.float64, len(scores))


def all_scored(rewards: Column, errors: Column, service: str) -> Column:
    """The rewards, where every row has one."""
    assert isinstance(errors, LocalColumn), "verdicts come in the response itself"
    failed = [(row, cause) for row, cause in enumerate(errors.texts) if cause]
    if failed:
        row, cause = failed[0]
        raise RewardFailed(
            f"{service}: {len(failed)} of {len(errors.texts)} rows could not be scored; row {row}: {cause}"
        )
    return rewards


def failure_of(score: reward_pb2.RowScore) -> str:
    """Why a row has no reward to train on; empty where it has."""
    verdict = score.WhichOneof("verdict")
    if verdict in (None, "error"):
        return score.error or "no verdict"
    values = [score.score] if verdict == "score" else score.token_scores.scores
    bad = [value for value in values if not abs(value) <= FLOAT32_MAX]
    return f"score {bad[0]:g} is not a float32 number" if bad else ""


def _struct(text: str) -> struct_pb2.Struct:
    """The object of a JSON text.

    Raises:
        InvalidRequest: The text is no object, or one that a Struct cannot hold.
    """
    try:
        return json_format.Parse(text, struct_pb2.Struct())
    except json_format.ParseError as error:
        raise InvalidRequest(f"metadata {text[:80]!r}: {error}") from None
