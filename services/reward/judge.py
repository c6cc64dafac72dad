"""Scores by a generative judge: a language model behind an OpenAI-compatible endpoint.

If a completion does not contain exactly one score within the bounds, the row is an error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError, RewardFailed
from rlhf.v1 import reward_pb2
from services.reward.scorers.base import Scorer, row_score
from services.reward.scorers.side_by_side import score_side_by_side
from services.runtime.worker import CallContext
from settings.reward import JudgeTable

if TYPE_CHECKING:
    import httpx

BUSY = frozenset({408, 409, 425, 429})
"""HTTP status codes, besides those from 500, after which the request is retried."""
MAX_RETRY_AFTER_S = 60.0
"""Longest Retry-After, in seconds, after which a request is retried; a longer one makes the row an error."""
MAX_QUOTE = 200
"""Maximum number of characters of a completion that an error message quotes."""

_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")


class Busy(Exception):
    """A request to the judge failed; a retry after at least `wait_s` seconds may succeed."""

    def __init__(self, failure: str, wait_s: float = 0.0) -> None:
        super().__init__(failure)
        self.wait_s = wait_s


class JudgeScorer(Scorer):
    """Scores each row by one request to the judge, with retries; requests of several rows run in parallel. A row whose
    request fails, or whose completion has no valid score, gets an error.

    Args:
        table: The table `judge` of the config.

    Raises:
        ConfigError: httpx is not installed, the table lacks url or model, or the environment lacks the API key.
    """

    def __init__(self, table: JudgeTable) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("kind: judge needs httpx; pip install 'rlhf-cluster[judge]'")
        for key in ("url", "model"):
            if not getattr(table, key):
                raise ConfigError(f"judge.{key}: a reward of kind judge needs one")
        # By default httpx logs every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._table = table
        self.score_range = (table.lowest, table.highest)
        self._headers = _authorization(table.api_key_variable)
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None

    def kind(self) -> str:
        return f"judge {self._table.model}"

    def close(self) -> None:
        """Closes the connections to the judge."""
        if self._client is not None:
            self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scoring = score_side_by_side(rows, call, self._table.concurrency, self._score)
        return self._loop.run_until_complete(scoring)

    async def _score(self, slot: int, row: reward_pb2.TextRow) -> reward_pb2.RowScore:
        try:
            said = await self._ask(fill(self._table.rubric, row))
            return row_score(read_score(said, self._table))
        except RewardFailed as error:
            return reward_pb2.RowScore(error=f"judge {self._table.model}: {error}")

    async def _ask(self, question: str) -> str:
        """Returns the judge's completion of a question, with retries.

        Raises:
            RewardFailed: A request failed for good, or all attempts failed.
        """
        for attempt in range(self._table.retries + 1):
            try:
                return read_completion(await self._request(question))
            except Busy as busy:
                failure, wait_s = str(busy), busy.wait_s
            if attempt < self._table.retries:
                await asyncio.sleep(max(self._table.backoff_s * 2**attempt, wait_s))
        raise RewardFailed(f"{failure}, after {self._table.retries + 1} tries")

    async def _request(self, question: str) -> Any:
        """Sends one request and returns the decoded JSON of the response.

        Raises:
            Busy: The request failed, and a retry may succeed.
            RewardFailed: The request failed, and a retry would fail too.
        """
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(headers=self._headers, trust_env=False)
        url = f"{self._table.url.rstrip('/')}/chat/completions"
        body = {
            "model": self._table.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self._table.temperature,
            "max_tokens": self._table.max_tokens,
        }
        try:
            sent = self._client.post(url, json=body, timeout=None)
            reply = await asyncio.wait_for(sent, self._table.request_timeout_s)
        except TimeoutError:
            raise Busy(f"no answer within {self._table.request_timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise Busy(f"{url} cannot be reached: {type(error).__name__} {error}".rstrip()) from error
        except httpx.RequestError as error:
            raise Busy(f"the answer cannot be read: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code in BUSY or reply.status_code >= 500:
            wait_s = _retry_after_s(reply.headers.get("retry-after", ""))
            if wait_s > MAX_RETRY_AFTER_S:
                raise RewardFailed(
                    f"HTTP {reply.status_code} with Retry-After {wait_s:g} s; the longest allowed is "
                    f"{MAX_RETRY_AFTER_S:g} s"
                )
            raise Busy(f"HTTP {reply.status_code}", wait_s)
        if not reply.is_success:
            raise RewardFailed(f"HTTP {reply.status_code}: {_quote(reply.text)}")
        try:
            return reply.json()
        except (ValueError, RecursionError):
            raise RewardFailed(f"the answer is not valid JSON: {_quote(reply.text)}") from None


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
        raise RewardFailed(f"the answer is not a chat completion: {_quote(str(answer))}") from None
    if not isinstance(said, str):
        raise RewardFailed(f"the chat completion has no text: {_quote(str(said))}")
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
        raise RewardFailed(f"the judge's answer contains no score: {_quote(said)}")
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
        raise RewardFailed(f"the score {found!r} is not a number, in {_quote(said)}") from None


def _authorization(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"judge.api_key_variable: the environment has no {variable}")
    return {"Authorization": f"Bearer {key}"}


def _retry_after_s(header: str) -> float:
    return float(header) if header.isascii() and header.isdigit() else 0.0


def _quote(text: str) -> str:
    return repr(text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}...")
