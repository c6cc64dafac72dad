"""An environment for the sums of the quickstart: a calculator that reads back a wrong answer's sum, to be copied.

`rollout.environment.factory = "rlhf_example.calculator:Calculator"`; docs/multi_turn.md is the guide.
"""

from __future__ import annotations

from typing import Any


class Calculator:
    """The environment of one episode: one sum, such as "12+34=".

    Args:
        prompt: The prompt.
        ground_truth: The right answer.
        metadata: Further fields of the row.
        discount: Factor of the reward for each use of the calculator.
    """

    def __init__(
        self, prompt: str, ground_truth: str, metadata: dict[str, Any], discount: float = 0.8
    ) -> None:
        self._sum = prompt.strip().removesuffix("=")
        self._right, self._discount = ground_truth, discount
        self._answer, self._uses = "", 0

    def step(self, response: str) -> str | None:
        """Takes what the policy said in a turn; returns the text that follows it, or None at the end of the episode."""
        self._answer = response.strip()
        if self._answer == self._right:
            return None
        self._uses += 1
        return f";{_add(self._sum)}="

    def reward(self) -> float:
        """Returns the reward of the episode: 1 for a right answer at once, less for one with the calculator, else 0."""
        return self._discount**self._uses if self._answer == self._right else 0.0


def _add(terms: str) -> int:
    return sum(int(term) for term in terms.split("+"))
