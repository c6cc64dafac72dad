"""Rewards as users write them, in every signature that is accepted, and some that are not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.reward.groups import over_groups

under_way, most, cancelled = 0, 0, 0
"""Of `slow`: calls that are under way, the most at a time, and those that were cancelled."""
loops: set[int] = set()
"""Ids of the event loops on which `slow` has run."""


def rich(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """A score with further numbers, and things that are no numbers."""
    if response == "unscored":
        return {"acc": 1.0}
    return {
        "score": len(response),
        "acc": response == "aa",
        "pred": response,
        "worst": float("nan"),
        "few": [1, 2],
    }


def many(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """A number of another name for each response."""
    return {"score": 1, response: 2}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, scale: float = 1.0
) -> Any:
    """As verl has it."""
    return {"score": scale * (solution_str == ground_truth), "acc": float(solution_str == ground_truth)}


def per_token(
    prompt: str, response: str, ground_truth: str, metadata: Any, response_tokens: int, penalty: float = 0.1
) -> list[float]:
    """A score for each token of the response."""
    return [-penalty] * (response_tokens - 1) + [1.0]


def array_per_token(
    prompt: str, response: str, ground_truth: str, metadata: Any, response_tokens: int
) -> np.ndarray:
    """A score for each token of the response, as an array."""
    return np.arange(1, response_tokens + 1) // response_tokens


@over_groups
def shortest(
    prompt: str, responses: list[str], ground_truth: str, metadata: Any, response_tokens: list[int]
) -> list[float]:
    """1 for the responses with the fewest tokens of the group."""
    return [float(count == min(response_tokens)) for count in response_tokens]


def verl_tokens(solution_str: str, response_tokens: int, scale: float = 1.0) -> float:
    """As verl has it, with the number of tokens."""
    return scale * response_tokens


async def trl_tokens(completions: list[str], response_tokens: list[int], **columns: Any) -> list[float]:
    """As TRL has it, with the numbers of tokens; it waits."""
    await asyncio.sleep(0)
    return [float(count) for count in response_tokens]


async def async_compute_score(data_source: str, solution_str: str, ground_truth: str, **rest: Any) -> Any:
    """As verl has it, for rewards that wait."""
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth), "waited": 1}


def trl(completions: list[str], **columns: Any) -> list[float]:
    """As TRL has it: the share of all characters of the batch."""
    total = sum(map(len, completions))
    return [len(text) / total for text in completions]


def trl_columns(
    prompts: list[str], completions: list[str], level: list[Any], ground_truth: list[str], bonus: float = 0.0
) -> list[float | None]:
    """As TRL has it, with columns of the data; a row without level has no score."""
    rows = zip(prompts, completions, level, ground_truth, strict=True)
    return [None if of is None else of + (text == truth) + bonus for _, text, of, truth in rows]


def trl_messages(completions: list[list[dict[str, str]]], prompts: Any, **columns: Any) -> list[float]:
    """As TRL's own rewards have it, of conversations."""
    assert [message["role"] for each in completions for message in each] == ["assistant"] * len(completions)
    assert [each[0]["content"] for each in prompts] == ["p"] * len(prompts)
    return [float(len(completion[0]["content"])) for completion in completions]


def trl_declared(completions, **columns):  # type: ignore[no-untyped-def]
    """The same without annotations."""
    return [float(len(completion[0]["content"])) for completion in completions]


trl_declared.conversational = True  # type: ignore[attr-defined]


def trl_undeclared(completions, **columns):  # type: ignore[no-untyped-def]
    return [float(len(completion[0]["content"])) for completion in completions]


async def trl_async(completions: list[str], **columns: Any) -> list[float]:
    """As newer TRL has it."""
    await asyncio.sleep(0)
    return [float(len(completions))] * len(completions)


def trl_short(completions: list[str], **columns: Any) -> list[float]:
    """One score for all."""
    return [1.0]


def trl_ids(completions: list[str], completion_ids: list[Any]) -> list[float]:
    """Needs what is not there."""
    return [0.0 for _ in completion_ids]


@over_groups
def named_like_trl(prompt: str, completions: Sequence[str], ground_truth: str, metadata: Any) -> list[float]:
    """A function over groups whose second parameter has TRL's name."""
    return [float(len(completions))] * len(completions)


async def slow(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """Waits as long as the response says, or fails."""
    global under_way, most, cancelled
    loops.add(id(asyncio.get_running_loop()))
    under_way += 1
    most = max(most, under_way)
    try:
        if response == "fail":
            raise TimeoutError("its own")
        await asyncio.sleep(float(response))
        return float(response)
    except asyncio.CancelledError:
        cancelled += 1
        raise
    finally:
        under_way -= 1


async def stubborn(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Raises CancelledError, or waits as long as the response says, even if it is cancelled."""
    if response == "cancelled":
        raise asyncio.CancelledError
    end = asyncio.get_running_loop().time() + float(response)
    while (left := end - asyncio.get_running_loop().time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)
    return 1.0


@over_groups
async def slow_group(prompt: str, responses: Sequence[str], ground_truth: str, metadata: Any) -> list[float]:
    """Scores a group after a while."""
    await asyncio.sleep(0.01)
    return [float(len(responses))] * len(responses)


class Callable:
    """An object that is a reward."""

    async def __call__(self, prompt: str, response: str, ground_truth: str, metadata: Any) -> float:
        return 0.25


instance = Callable()


def one_argument(response: str) -> float:
    """Not a reward."""
    return 0.0


def five_arguments(prompt: str, response: str, ground_truth: str, metadata: Any, tokenizer: Any) -> float:
    """Not a reward."""
    return 0.0


def verl_and_more(solution_str: str, tokenizer: Any) -> float:
    """Not a reward of verl."""
    return 0.0


def by_name_alone(prompt: str, response: str, ground_truth: str, metadata: Any, *, weight: float) -> float:
    """Needs an option."""
    return weight
