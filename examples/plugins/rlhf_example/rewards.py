"""Rewards over groups: they see all responses to a prompt at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.groups import over_groups


@over_groups
def concise(
    prompt: str, responses: Sequence[str], ground_truth: str, metadata: Mapping[str, Any], bonus: float = 0.5
) -> list[float]:
    """Scores a response whose last word is right 1 - bonus, plus the bonus times the length of the group's shortest
    right response over its own length; any other scores 0. The policy learns to be right first, and then brief."""
    is_right = [response.split()[-1:] == [ground_truth.strip()] for response in responses]
    lengths = [len(text) if right else None for text, right in zip(responses, is_right, strict=True)]
    shortest = min((length for length in lengths if length), default=1)
    return [1 - bonus + bonus * shortest / length if length else 0.0 for length in lengths]


@over_groups
def shared(
    prompt: str, responses: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]
) -> list[float]:
    """Right responses share 1 among them, so that one that few others find earns more; a wrong one scores 0."""
    right = [response.strip() == ground_truth.strip() for response in responses]
    return [is_right / max(sum(right), 1) for is_right in right]


concise.score_range = shared.score_range = (0.0, 1.0)
