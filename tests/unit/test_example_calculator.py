"""The calculator of docs/multi_turn.md: what it answers, what it rewards, and that the page has the same class."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.plugins.rlhf_example.calculator import Calculator

PAGE = Path(__file__).parents[2] / "docs" / "multi_turn.md"


@pytest.mark.parametrize(
    ("said", "answers", "reward"),
    [
        (["46"], [None], 1.0),
        (["45", " 6 "], [";12+34=4", None], 0.8),
        (["45", "", "6"], [";12+34=4", ";12+34=4", None], 0.64),
        (["45", "46"], [";12+34=4", ";12+34=4"], 0.0),
    ],
)
def test_a_wrong_answer_is_shown_its_sum_without_the_last_digit_and_costs_reward(
    said: list[str], answers: list[str | None], reward: float
) -> None:
    calculator = Calculator(prompt="12+34=", ground_truth="46", metadata={})
    assert [calculator.step(text) for text in said] == answers
    assert calculator.reward() == pytest.approx(reward)


def test_the_page_has_the_same_class() -> None:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    namespace: dict[str, type[Calculator]] = {}
    exec(code, namespace)
    for factory in (namespace["Calculator"], Calculator):
        calculator = factory(prompt="12+34=", ground_truth="46", metadata={}, discount=0.5)
        assert [calculator.step("45"), calculator.step("6")] == [";12+34=4", None]
        assert calculator.reward() == 0.5
