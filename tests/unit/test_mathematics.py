"""The reward `math`: its verdicts on pairs written down beforehand, where it finds answers, and what it refuses."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.v1 import common_pb2, reward_pb2
from services.reward.functions import find_function
from services.reward.mathematics import read_truth
from services.reward.mathematics.extract import last_answer
from services.reward.processes import ProcessScorer
from services.reward.scorers.base import GaveUp
from services.runtime.worker import CallContext

pytest.importorskip("math_verify")

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "math_pairs.jsonl").read_text("utf-8").splitlines()
]
WRONG = {(r"\boxed{B}", "b")}
"""Pairs that are known to be judged otherwise than expected: math-verify does not tell case in lone letters."""


def score(response: str, ground_truth: str) -> float:
    verdict: Any = find_function("math")("", response, ground_truth, {})
    return verdict


def test_the_pairs_have_five_of_each_kind_in_each_direction() -> None:
    counts = Counter((pair["class"], pair["equal"]) for pair in PAIRS)
    assert len(PAIRS) >= 150
    assert min(counts.values()) >= 5
    assert all((kind, not equal) in counts for kind, equal in counts)


def test_what_is_equal_as_mathematics_scores_1_and_what_is_not_0() -> None:
    wrong = {
        (pair["response"], pair["ground_truth"])
        for pair in PAIRS
        if score(pair["response"], pair["ground_truth"]) != pair["equal"]
    }
    assert wrong == WRONG
    assert len(wrong) <= 0.03 * len(PAIRS)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, no: \boxed {\frac{1}{2}} in all", r"\frac{1}{2}"),
        (r"\fbox{\boxed{3}}", "3"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"$\boxed 7$", "7"),
        (r"\boxed{3} and then \boxed{4", None),
        (r"\boxed", None),
        ("The answer is $x+1$, which took 3 steps.", "x+1"),
        ("Answer: 17 apples of 20", "17"),
        (r"First $y=2$, so \(x = 5\)", "x = 5"),
        ("I paid $5, she paid $6", "6"),
        ("It is 1/2.", "1/2"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_answer_is_in_the_last_box_or_else_where_it_is_announced_or_else_last(
    text: str, answer: str | None
) -> None:
    assert last_answer(text) == answer


@pytest.mark.parametrize("truth", ["", "  ", r"\boxed{4", r"\frac{1}{", "19_2", "9" * 2000, "9^{9^{9^9}}+x"])
def test_a_ground_truth_that_cannot_be_read_is_an_error_and_no_zero(truth: str) -> None:
    with pytest.raises(ValueError, match="the ground truth"):
        read_truth(truth)


HOSTILE = {
    "too_large": [
        r"9^{9^{9^9}}", r"9^{-9^{9^9}}", r"(((9!)!)!)!", r"1000000!", r"\sqrt{9^{9^{9}}}", r"\binom{1000000}{500000}",
        r"\binom{9!}{8!}", r"\sum_{i=1}^{1000000000} \sin i", r"e^{e^{e^{e^{e}}}}", "9" * 400,
        r"1\cdot 10^{999999999}", r"\begin{pmatrix} 9^{9^{9^9}} \\ 1 \end{pmatrix}",
    ],
    "too_deep": ["(" * 400 + "1" + ")" * 400, r"\frac{1}{" * 40 + "x" + "}" * 40],
    "too_long": ["x+" * 600 + "1", "9" * 100_000, "½" * 900],
}  # fmt: skip
"""Answers by the cause for which they are not computed."""
COSTLY = [
    r"\int \frac{\sin x^{17}}{1+x^{19}+e^{x}} dx", r"\gcd(9^{9^{9}},3)", r"(3, 9^{9^{9^9}})",
]  # fmt: skip
"""Answers of which nothing tells beforehand that they would take for ever."""


@pytest.mark.parametrize(("cause", "answer"), [(cause, each) for cause in HOSTILE for each in HOSTILE[cause]])
def test_an_answer_that_is_too_large_to_compute_with_is_given_up_before(cause: str, answer: str) -> None:
    with pytest.raises(GaveUp, match=cause):
        score(rf"\boxed{{{answer}}}", r"(3,\frac{\sqrt{3}}{2})")


@pytest.fixture(scope="module")
def scorer() -> Iterator[ProcessScorer]:
    scorer = ProcessScorer("math", {}, processes=2, row_timeout_s=10.0)
    yield scorer
    scorer.close()


def test_hostile_responses_are_wrong_end_nothing_and_cost_two_seconds_at_most_on_average(
    scorer: ProcessScorer,
) -> None:
    answers = [*(answer for each in HOSTILE.values() for answer in each), *COSTLY]
    context = CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 100)
    rows = [
        reward_pb2.TextRow(response=rf"\boxed{{{answer}}}", ground_truth=r"\frac{\sqrt{3}}{2}+x")
        for answer in [*answers, r"x+\frac{\sqrt{3}}{2}"]
    ]
    started = time.monotonic()
    *hostile, right = scorer.score_texts(rows, context)
    assert time.monotonic() - started <= 2.0 * len(answers)
    assert [verdict.WhichOneof("verdict") for verdict in hostile] == ["score"] * len(answers)
    assert {verdict.score for verdict in hostile} == {0.0}
    assert right.score == 1
    assert scorer.metrics["gave_up"][0] == len(answers)
    assert scorer.metrics["gave_up/timeout"][0] == len(COSTLY)


def test_a_trailing_dot_of_a_ground_truth_is_no_error(scorer: ProcessScorer) -> None:
    context = CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 100)
    row = reward_pb2.TextRow(response=r"\boxed{12}", ground_truth="12.")
    (verdict,) = scorer.score_texts([row], context)
    assert verdict.score == 1
