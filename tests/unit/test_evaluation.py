"""Metrics on held-out rows: their names, accuracy or reward, and pass@k."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.role_groups.dataflow import FutureBatch
from controller.training.pass_at_k import pass_at_k, sampled_evaluation
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


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_that_contain_a_right_one(samples: int) -> None:
    for solved in range(samples + 1):
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(range(samples), k))
            share = sum(min(draw) < solved for draw in draws) / len(draws)
            assert pass_at_k(np.array([solved]), np.array([samples]), k) == pytest.approx([share])


def test_responses_that_were_not_scored_are_not_wrong() -> None:
    """Of two prompts with four responses each, one right response and three without a score, and all right but one."""
    nan = math.nan
    scores = np.array([1.0, nan, nan, nan, 1.0, 1.0, 0.0, 1.0])
    actor: Any = SimpleNamespace(generate_sequences=lambda rows: FutureBatch.of(response=np.zeros(rows.rows)))
    reward: Any = SimpleNamespace(score_for_eval=lambda batch: FutureBatch.of(rewards=scores))
    evaluation = sampled_evaluation(actor, reward, samples=4, solved_at=1.0)
    values, _ = evaluation.measure(FutureBatch.of(prompt=["a", "b"]))
    assert evaluation.summarize(values) == {
        "sampled_reward": 0.8,
        "pass_at_1": (1 + 3 / 4) / 2,
        "pass_at_2": 1.0,  # of the second prompt alone
        "pass_at_4": 1.0,
        "rows_dropped": 3.0,
    }
