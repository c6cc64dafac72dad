"""Scores by a generative judge: a language model behind an OpenAI-compatible endpoint.

If a completion does not contain exactly one score within the bounds, the row is an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from rlhf.errors import ConfigError, RewardFailed
from rlhf.v1 import reward_pb2
from services.reward.json_client import MAX_QUOTE, JsonClient, header_of, quoted
from services.reward.scorers.base import Scorer, row_score
from services.reward.scorers.side_by_side import score_side_by_side
from services.runtime.worker import CallContext
from settings.endpoints import JudgeTable

_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")


class JudgeScorer(Scorer):
    """Scores each row by one request to the judge, with retries; requests of several rows run in parallel. A row whose
    request fails, or whose completion has no valid score, gets an error.

    Args:
        table: The table `judge` of the config.

    Raises:
        ConfigError: httpx is not installed, the table lacks url or model, or the environment lacks the API key.
    """

    def __init__(self, table: JudgeTable) -> None:
        for key in ("url", "model"):
            if not getattr(table, key):
                raise ConfigError(f"judge.{key}: a reward of kind judge needs one")
        self._table = table
        self.score_range = (table.lowest, table.highest)
        url = f"{table.url.rstrip('/')}/chat/completions"
        self._client = JsonClient([url], table, _authorization(table.api_key_variable))
        self._loop = asyncio.new_event_loop()

    def kind(self) -> str:
        return f"judge {self._table.model}"

    def close(self) -> None:
        """Closes the connections to the judge."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scoring = score_side_by_side(rows, call, self._table.concurrency, self._score)
        return self._loop.run_until_complete(scoring)

    async def _score(self, slot: int, row: reward_pb2.TextRow) -> reward_pb2.RowScore:
        try:
            answer = await self._client.post(self._body(fill(self._table.rubric, row)))
            return row_score(read_score(read_completion(answer.content), self._table))
        except RewardFailed as error:
            return reward_pb2.RowScore(error=self._client.redacted(f"judge {self._table.model}: {error}"))

    def _body(self, question: str) -> dict[str, Any]:
        return {
            "model": self._table.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self._table.temperature,
            "max_tokens": self._table.max_tokens,
        }


def fill(rubric: str, row: reward_pb2.TextRow) -> str:
    """Replaces the fields {prompt}, {response} and {ground_truth} of a rubric by a row's texts. Other braces are
    kept."""
    return _FIELD.sub(lambda match: getattr(row, match[1]), rubric)


def read_completion(answer: Any) -> str:
    """Returns the text of a chat completion.

    Args:
        answer: Decoded JSON of the response.

    Raises:
        RewardFailed: The response is not a chat completion with text, or was cut off at max_tokens.
    """
    try:
        choice = answer["choices"][0]
        said, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RewardFailed(f"the answer is not a chat completion: {quoted(str(answer))}") from None
    if not isinstance(said, str):
        raise RewardFailed(f"the chat completion has no text: {quoted(str(said))}")
    if reason == "length":
        raise RewardFailed(f"the judge was cut off at max_tokens: ...{said[-MAX_QUOTE:]!r}")
    return said


def read_score(said: str, table: JudgeTable) -> float:
    """Returns the score that a completion contains.

    Args:
        said: Text of the completion.
        table: The judge's config, with the pattern of a score and its bounds.

    Raises:
        RewardFailed: The completion contains no score, several different scores, a score out of bounds, or a match of
            the pattern that is not a number.
    """
    scores = sorted({_number(found, said) for found in re.findall(table.verdict_pattern, said)})
    if not scores:
        raise RewardFailed(f"the judge's answer contains no score: {quoted(said)}")
    if len(scores) > 1:
        raise RewardFailed(
            f"the judge's answer contains several scores: {', '.join(f'{score:g}' for score in scores)}"
        )
    (score,) = scores
    if not table.lowest <= score <= table.highest:
        raise RewardFailed(f"score {score:g} is not between {table.lowest:g} and {table.highest:g}")
    return score


def _number(found: str, said: str) -> float:
    try:
        return float(found)
    except ValueError:
        raise RewardFailed(f"the score {found!r} is not a number, in {quoted(said)}") from None


def _authorization(variable: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {header_of(variable, 'judge.api_key_variable')}"} if variable else {}
