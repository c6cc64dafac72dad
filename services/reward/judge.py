"""A generative judge: a language model behind an OpenAI-compatible endpoint says what a response is worth.

What cannot be read as one score within bounds is an error of the row, never a guess.
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
"""HTTP codes, besides all from 500, after which another try may succeed."""
MAX_QUOTE = 200
"""Characters of what the judge said that an error repeats."""

_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")


class JudgeScorer(Scorer):
    """Asks the judge once per row, a number of rows side by side.

    Raises:
        ConfigError: httpx is not installed, or the table lacks url, model, or the key that it names.
    """

    def __init__(self, table: JudgeTable) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("kind: judge needs httpx; pip install 'rlhf-cluster[judge]'")
        for key in ("url", "model"):
            if not getattr(table, key):
                raise ConfigError(f"judge.{key}: a reward of kind judge needs one")
        # At its usual level it would log every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._table = table
        self.score_range = (table.lowest, table.highest)
        self._headers = _authorization(table.api_key_variable)
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None

    def kind(self) -> str:
        return f"judge {self._table.model}"

    def close(self) -> None:
        """Closes the connections."""
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
        """Answer of the judge, with retries. Raises RewardFailed."""
        for attempt in range(self._table.retries + 1):
            answer, failure, wait_s = await self._try(question)
            if not failure:
                return read_completion(answer)
            if wait_s is None:
                raise RewardFailed(failure)
            if attempt < self._table.retries:
                await asyncio.sleep(max(self._table.backoff_s * 2**attempt, wait_s))
        raise RewardFailed(f"{failure}, after {self._table.retries + 1} tries")

    async def _try(self, question: str) -> tuple[Any, str, float | None]:
        """One request: the answer's JSON; or why there is none, and how long to wait before the next, None where it
        would be in vain."""
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
            return None, f"no answer within {self._table.request_timeout_s:g} s", 0.0
        except httpx.TransportError as error:
            return None, f"{url} cannot be reached: {type(error).__name__} {error}".rstrip(), 0.0
        except httpx.RequestError as error:
            return None, f"the answer cannot be read: {type(error).__name__} {error}".rstrip(), 0.0
        if reply.status_code in BUSY or reply.status_code >= 500:
            return None, f"HTTP {reply.status_code}", _retry_after_s(reply.headers.get("retry-after", ""))
        if not reply.is_success:
            return None, f"HTTP {reply.status_code}: {_quote(reply.text)}", None
        try:
            return reply.json(), "", None
        except (ValueError, RecursionError):
            return None, f"the answer is no JSON: {_quote(reply.text)}", None


def fill(rubric: str, row: reward_pb2.TextRow) -> str:
    """The rubric with the texts of a row put in; braces in those texts stay as they are."""
    return _FIELD.sub(lambda match: getattr(row, match[1]), rubric)


def read_completion(answer: Any) -> str:
    """The text of a chat completion. Raises RewardFailed where there is none."""
    try:
        choice = answer["choices"][0]
        said, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RewardFailed(f"the answer is no chat completion: {_quote(str(answer))}") from None
    if not isinstance(said, str):
        raise RewardFailed(f"the judge said no text: {_quote(str(said))}")
    if reason == "length":
        raise RewardFailed(f"the judge was cut off at max_tokens: ...{said[-MAX_QUOTE:]!r}")
    return said


def read_score(said: str, table: JudgeTable) -> float:
    """The score in what the judge said.

    Raises:
        RewardFailed: There is none, there are several that differ, or it is out of bounds.
    """
    scores = sorted({_number(found, said) for found in re.findall(table.verdict_pattern, said)})
    if not scores:
        raise RewardFailed(f"no score in what the judge said: {_quote(said)}")
    if len(scores) > 1:
        raise RewardFailed(f"the judge gave several scores: {', '.join(f'{score:g}' for score in scores)}")
    (score,) = scores
    if not table.lowest <= score <= table.highest:
        raise RewardFailed(f"score {score:g} is not between {table.lowest:g} and {table.highest:g}")
    return score


def _number(found: str, said: str) -> float:
    try:
        return float(found)
    except ValueError:
        raise RewardFailed(f"{found!r} is no number, in {_quote(said)}") from None


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
