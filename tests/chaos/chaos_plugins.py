"""User plugins with faults: a reward whose ground truth selects the fault, and an algorithm."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from controller.training.run import Run


def one_argument(response: str) -> float:
    """No reward: it takes neither the prompt nor anything else."""
    return 0.0


def score(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """0, unless the ground truth asks for trouble."""
    match ground_truth:
        case "raise":
            raise ZeroDivisionError(f"no score for {prompt}")
        case "nan":
            return math.nan
        case "huge":
            return 1e40
        case "hang":
            threading.Event().wait()
    return 0.0


def rollouts(run: Run) -> None:
    """Generates and scores, and never learns: the least that keeps an actor and a reward busy."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        step.finish(batch | reward.compute_reward(batch))
