"""Names of metrics on held-out rows: accuracy or reward."""

from __future__ import annotations

import pytest

from controller.training.policy_evaluation import is_share
from rlhf.v1 import worker_pb2


def said(lowest: float, highest: float) -> worker_pb2.DescribeResponse:
    return worker_pb2.DescribeResponse(score_range=worker_pb2.ScoreRange(lowest=lowest, highest=highest))


SERVICES = {
    "answer": said(0, 1),
    "form": said(0, 1),
    "judge": said(0, 10),
    "model": worker_pb2.DescribeResponse(),
}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"answer": 1.0}, True),
        ({"answer": 0.8, "form": 0.2}, True),
        ({"judge": 0.1}, True),
        ({"answer": 1.0, "form": 0.2}, False),
        ({"answer": 1.0, "form": -0.2}, False),
        ({"judge": 1.0}, False),
        ({"model": 1.0}, False),
        ({"answer": 0.5, "model": 0.5}, False),
    ],
)
def test_a_reward_is_an_accuracy_where_it_lies_between_0_and_1(
    weights: dict[str, float], expected: bool
) -> None:
    assert is_share(weights, SERVICES) is expected
