"""Environments of a user, found by the controller as `toy_environments:NAME`. They must not import torch."""

from __future__ import annotations

from typing import Any


class Nines:
    """Asks for two more turns, whatever was said. Its reward is the share of nines among what the policy said."""

    def __init__(self, prompt: str, ground_truth: str, metadata: dict[str, Any], fails: str = "") -> None:
        self._fails = bool(fails) and fails in prompt
        self._said = ""

    async def step(self, response: str) -> str | None:
        """Returns what follows a turn. Raises ValueError where `fails` is in the prompt."""
        if self._fails:
            raise ValueError("the calculator is broken")
        self._said += response + "."
        return ";9=" if self._said.count(".") < 3 else None

    def reward(self) -> float:
        """Returns the share of nines."""
        return self._said.count("9") / max(len(self._said) - self._said.count("."), 1)
