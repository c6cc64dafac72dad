"""A reward over groups: it sees all responses to a prompt at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.groups import over_groups


@over_groups
def concise(
    prompt: str, responses: Sequence[str], ground_truth: str, metadata: Mapping[str, Any], bonus: float = 0.5
) -> list[float]:
    """Scores a right response 1 - bonus, plus the bonus times the length of the group's shortest right response over
    its own length; a wrong one scores 0. So the policy learns to be right first, and then to be brief."""
    texts = [response.strip() for response in responses]
    lengths = [max(len(text), 1) if text == ground_truth.strip() else None for text in texts]
    shortest = min((length for length in lengths if length), default=1)
    return [1 - bonus + bonus * shortest / length if length else 0.0 for length in lengths]


concise.score_range = (0.0, 1.0)
