"""Which verdicts of a reward service can be trained on, and what is said of the others."""

from __future__ import annotations

import numpy as np
import pytest

from controller.role_groups.verdicts import failure_of, miscounted
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.v1.reward_pb2 import RowScore, TokenScores


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (RowScore(score=0.5), ""),
        (RowScore(score=3.4e38), ""),
        (RowScore(score=1e40), "score 1e+40 is not a float32 number"),
        (RowScore(score=float("nan")), "score nan is not a float32 number"),
        (
            RowScore(token_scores=TokenScores(scores=[0.5, float("-inf")])),
            "score -inf is not a float32 number",
        ),
        (RowScore(error="no program"), "no program"),
        (RowScore(error=""), "no verdict"),
        (RowScore(), "no verdict"),
    ],
    ids=str,
)
def test_a_verdict_that_cannot_be_trained_on_has_a_cause(verdict: RowScore, cause: str) -> None:
    assert failure_of(verdict) == cause


def test_token_scores_are_one_per_response_token() -> None:
    rewards = LocalColumn(Jagged(np.zeros(6), np.array([2, 3, 0, 1])))
    errors = LocalColumn(["", "", "no program", ""])
    responses = LocalColumn(Jagged(np.zeros(8, np.int64), np.array([2, 4, 1, 1])))
    causes = miscounted([rewards, errors, responses])
    assert isinstance(causes, LocalColumn)
    assert causes.texts == ["", "3 token scores for a response of 4 tokens", "no program", ""]


def test_scores_of_responses_need_no_count() -> None:
    errors = LocalColumn(["", "no program"])
    responses = LocalColumn(Jagged(np.zeros(4, np.int64), np.array([1, 3])))
    assert miscounted([LocalColumn(np.array([1.0, np.nan])), errors, responses]) is errors
