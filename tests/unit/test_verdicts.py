"""Which verdicts of a reward service can be trained on, and what is said of the others."""

from __future__ import annotations

import pytest

from controller.role_groups.verdicts import failure_of
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
