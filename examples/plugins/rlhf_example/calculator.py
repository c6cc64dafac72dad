"""An environment for the sums of the quickstart: after a wrong answer, a calculator shows the sum without its last
digit, which the policy adds.

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
        self._begun, self._answer, self._uses = "", "", 0

    def step(self, response: str) -> str | None:
        """Takes what the policy said in a turn; returns the text that follows it, or None at the end of the episode."""
        self._answer = self._begun + response.strip()
        if self._answer == self._right:
            return None
        self._uses += 1
        self._begun = str(sum(int(term) for term in self._sum.split("+")))[:-1]
        return f";{self._sum}={self._begun}"

    def reward(self) -> float:
        """Returns the reward of the episode: 1 for a right answer at once, less for one with the calculator, else 0."""
        return self._discount**self._uses if self._answer == self._right else 0.0
