"""Reward functions of a user, found by the reward service as `toy_rewards:NAME`. They must not import torch."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digit_mean(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """The mean digit of the response, between 0 and 1; other characters count as 0."""
    digits = [int(character) for character in response if character.isdigit()]
    return sum(digits) / 9 / max(len(response), 1)


digit_mean.score_range = (0.0, 1.0)  # type: ignore[attr-defined]


async def digit_mean_async(
    prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]
) -> dict[str, float]:
    """`digit_mean` by a function that waits, and the length of the response."""
    await asyncio.sleep(0)
    return {"score": digit_mean(prompt, response, ground_truth, metadata), "characters": len(response)}


def digit_mean_trl(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """`digit_mean` with the signature of TRL's rewards."""
    return [digit_mean(prompt, text, "", {}) for prompt, text in zip(prompts, completions, strict=True)]


def by_metadata(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """Reward that the row's metadata sets: returns `verdict`, or `number`, as text for numbers JSON lacks; raises
    `failure`."""
    if "failure" in metadata:
        raise ValueError(metadata["failure"])
    return float(metadata["number"]) if "number" in metadata else metadata["verdict"]


def dying(
    prompt: str,
    response: str,
    ground_truth: str,
    metadata: Mapping[str, Any],
    counter: str = "",
    at: str = "",
    instead: str = "kill",
) -> float:
    """`digit_mean`, by a process that ends before it has scored certain rows, as one without memory does, or stops.

    Args:
        counter: File with one byte for each row that was begun, by any process.
        at: Numbers of these rows, from 1, separated by commas; "all": each.
        instead: "kill": by SIGKILL; "exit": with exit code 1; "stop": stops until SIGCONT, and then scores the row.
    """
    with Path(counter).open("ab") as file:
        file.write(b".")
        number = file.tell()
    if at == "all" or str(number) in at.split(","):
        if instead == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP if instead == "stop" else signal.SIGKILL)
    return digit_mean(prompt, response, ground_truth, metadata)


dying.score_range = (0.0, 1.0)  # type: ignore[attr-defined]


def digit_tokens(
    prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], response_tokens: int
) -> list[float]:
    """`digit_mean` as scores of tokens, the later ones higher, whose mean it is."""
    mean = digit_mean(prompt, response, ground_truth, metadata)
    return [mean * 2 * (token + 1) / (response_tokens + 1) for token in range(response_tokens)]
