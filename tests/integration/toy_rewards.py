"""Reward functions of a user, found by the reward service as `toy_rewards:NAME`. They must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def digit_mean(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """The mean digit of the response, between 0 and 1; other characters count as 0."""
    digits = [int(character) for character in response if character.isdigit()]
    return sum(digits) / 9 / max(len(response), 1)


digit_mean.score_range = (0.0, 1.0)  # type: ignore[attr-defined]


def by_metadata(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """Reward that the row's metadata sets: returns `verdict`, or `number`, as text for numbers JSON lacks; raises
    `failure`."""
    if "failure" in metadata:
        raise ValueError(metadata["failure"])
    return float(metadata["number"]) if "number" in metadata else metadata["verdict"]
