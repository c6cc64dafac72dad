"""The task that both systems of `benchmarks.end_to_end` run: prompts, reward, sizes; and a stopwatch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns import Turns

VOCABULARY = 1024
GROUP = 8
"""Responses to a prompt in GRPO."""
KL_COEFFICIENT = 0.05
"""Weight of the KL penalty in PPO's reward. GRPO has none."""
LEARNING_RATE = 1e-5
CLIP = 0.2
VALUE_CLIP = 0.2
VALUE_COEFFICIENT = 0.1
"""Weight of the value loss, if it shares an optimizer with the policy's."""
LAMBDA = 0.95
MAX_GRAD_NORM = 1.0
TOKENS_TOGETHER = 2048
"""Approximate tokens of a micro-batch."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one iteration.

    Attributes:
        rows: Sequences.
        prompt_tokens, new_tokens: Of each.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses of the whole batch, as the HybridFlow paper counts them (section 8.1)."""
        return self.rows * (self.prompt_tokens + self.new_tokens)


def write_prompts(path: Path, count: int, num_tokens: int) -> None:
    """Rows of random words, each word a token."""
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (count, num_tokens))
    rows = ({"prompt": " ".join(map(word, row)), "ground_truth": ""} for row in drawn.tolist())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def word(token: int) -> str:
    """The text of a token."""
    return f"w{token}"


def even_words(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """The reward: the share of even words."""
    words = response.split()
    return sum(token[-1] in "02468" for token in words) / max(len(words), 1)


class Stopwatch:
    """Lets a loop iterate in its turn, and reports the time of each iteration.

    Args:
        warm_up: Iterations before the first turn.
        iterations: In a turn.
        details: Called at the end of a turn: what to say of it beside its seconds.
    """

    def __init__(
        self, turns: Turns, warm_up: int, iterations: int, details: Callable[[], Any] = lambda: None
    ) -> None:
        self._turns = turns
        self._warm_up, self._iterations = warm_up, iterations
        self._details = details
        self._num_done = 0
        self._laps: list[float] = []

    def lap(self) -> None:
        """Records that an iteration has ended."""
        self._num_done += 1
        self._laps.append(time.perf_counter())
        is_warm = self._num_done >= self._warm_up
        if not is_warm or (self._num_done - self._warm_up) % self._iterations:
            return
        # The first answer is of the warm-up: it says no more than that the process is ready.
        self._turns.answer({"seconds": np.diff(self._laps).tolist(), "details": self._details()})
        self._turns.wait()
        self._laps = [time.perf_counter()]


def num_steps(warm_up: int, iterations: int) -> int:
    """Iterations of a loop in all, with the one that begins after its last turn."""
    return warm_up + iterations + 1


def mean_of(dictionaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each key over all tables; a missing key counts as 0."""
    names = dict.fromkeys(name for each in dictionaries for name in each)
    return {name: sum(each.get(name, 0.0) for each in dictionaries) / len(dictionaries) for name in names}
