"""Reward functions over groups, for the tests of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hostile_verifiers

from services.reward.groups import over_groups


@over_groups
def place(
    prompt: str,
    responses: Sequence[str],
    ground_truth: str,
    metadata: Mapping[str, Any],
    of: float = 100.0,
) -> list[float]:
    """The size of the group times `of`, plus the place of the response in it."""
    return [of * len(responses) + index for index in range(len(responses))]


@over_groups
def obey(prompt: str, responses: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """Does what a response says (see `hostile_verifiers`), or returns what the prompt says; else the lengths."""
    odd = {
        "too few": [1.0],
        "a number": 1.0,
        "a text": "12",
        "by name": {"a": 1.0, "b": 2.0},
        "nothing": None,
        "of tokens": [[0.5] * len(response) for response in responses],
        "not finite": [float("nan"), 1.0],
    }
    return odd.get(prompt) if prompt in odd else [hostile_verifiers.obey("", r, "", {}) for r in responses]


def row_of_attribute(prompt: str, responses: Sequence[str], ground_truth: str, metadata: Any) -> list[int]:
    """As `place`, declared by the attribute alone."""
    return [len(responses)] * len(responses)


row_of_attribute.over_groups = True  # type: ignore[attr-defined]
