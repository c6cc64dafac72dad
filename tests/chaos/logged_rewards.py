"""A reward function that writes down what it scores, found by the reward service as `chaos.logged_rewards:NAME`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def logged(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """The share of digits in the response, after a line with prompt and response in the file that `ground_truth`
    names."""
    with Path(ground_truth).open("a") as file:
        file.write(json.dumps([prompt, response]) + "\n")
    return sum(character.isdigit() for character in response) / max(len(response), 1)
