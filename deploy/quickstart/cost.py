"""A cost on something that anyone can see in an answer of the quickstart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_a_seven(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Returns 1 where the response has the digit 7 in it, right or wrong; else 0."""
    return float("7" in response)
