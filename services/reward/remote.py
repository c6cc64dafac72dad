"""Scores by a program behind HTTP, which gets rows as JSON and answers with a score for each.

Request: {"rows": [{"prompt": TEXT, "response": TEXT, "ground_truth": TEXT, "metadata": OBJECT, "response_tokens":
NUMBER}, ...]}, where a row without "response_tokens" has an unknown number of them.
Answer: {"scores": [SCORE, ...]}, or {"results": [{"score": SCORE, "metrics": {NAME: NUMBER}, "error": TEXT}, ...]} with
"metrics" and "error" optional. A SCORE is a number, a list of one number per response token, or null for a row that
cannot be scored. docs/rewards.md describes it for authors of such programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError, InvalidRequest, RewardFailed, encodable
from rlhf.v1 import reward_pb2
from services.reward.conventions import TOKENS
from services.reward.json_client import JsonClient, header_of, shown_url
from services.reward.loaded import Scored
from services.reward.scorers.base import MAX_SHOWN, Scorer, metadata_of, row_score, shown
from services.reward.scorers.extras import extra_metrics, merged
from services.reward.scorers.side_by_side import score_side_by_side
from services.runtime.worker import CallContext
from settings.endpoints import HttpTable


class RemoteScorer(Scorer):
    """Scores rows by requests of up to `batch_rows` rows, several at a time, with retries. Where a request fails for
    good, or its answer is malformed as a whole, each of its rows gets the error.

    Args:
        table: The table `http` of the config.

    Raises:
        ConfigError: httpx is not installed, the table has no address, or the environment lacks the value of a header.
    """

    def __init__(self, table: HttpTable) -> None:
        if not table.urls:
            raise ConfigError("http.urls: a reward of kind http needs at least one address")
        headers = {
            header: header_of(variable, f"http.header_variables.{header}")
            for header, variable in table.header_variables.items()
        }
        self._table = table
        self._client = JsonClient(table.urls, table, headers)
        self._loop = asyncio.new_event_loop()

    def kind(self) -> str:
        return f"http {', '.join(map(shown_url, self._table.urls))}"

    def close(self) -> None:
        """Closes the connections."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scores: dict[int, reward_pb2.RowScore] = {}
        readable: list[tuple[int, dict[str, Any]]] = []
        for index, row in enumerate(rows):
            try:
                readable.append((index, json_row(row)))
            except InvalidRequest as error:
                scores[index] = reward_pb2.RowScore(error=str(error))
        size = self._table.batch_rows
        batches = [readable[start : start + size] for start in range(0, len(readable), size)]
        asked = [[row for _, row in batch] for batch in batches]
        scoring = score_side_by_side(asked, call, self._table.concurrency, self._score)
        scored = self._loop.run_until_complete(scoring)
        for batch, each in zip(batches, scored, strict=True):
            scores.update(zip((index for index, _ in batch), each.scores, strict=True))
        self.metrics = merged(each.metrics for each in scored)
        return [scores[index] for index in range(len(rows))]

    async def _score(self, slot: int, rows: Sequence[Mapping[str, Any]]) -> Scored:
        try:
            url, content = await self._client.post({"rows": rows})
            scored = read_answer(url, content, len(rows))
        except RewardFailed as error:
            scored = Scored([reward_pb2.RowScore(error=str(error))] * len(rows))
        for score in scored.scores:
            if score.error:
                score.error = self._client.redacted(score.error)
        return scored


def json_row(row: reward_pb2.TextRow) -> dict[str, Any]:
    """Returns a row as it is sent, without `TOKENS` where the row has none. Raises InvalidRequest as `metadata_of`
    does."""
    tokens = {TOKENS: row.response_tokens} if row.HasField(TOKENS) else {}
    return {
        "prompt": row.prompt,
        "response": row.response,
        "ground_truth": row.ground_truth,
        "metadata": metadata_of(row),
        **tokens,
    }


def read_answer(url: str, content: Any, num_rows: int) -> Scored:
    """Reads the answer to a request. An element that is no score becomes the error of its row.

    Args:
        url: Address that gave the answer, for errors.
        content: Decoded JSON of the answer.
        num_rows: Number of rows of the request.

    Raises:
        RewardFailed: The answer has not one element for each row.
    """
    keys = [key for key in ("scores", "results") if isinstance(content, Mapping) and key in content]
    if len(keys) != 1:
        raise RewardFailed(
            f'{url}: the answer is no object with either "scores" or "results": {shown(content)}'
        )
    key, given = keys[0], content[keys[0]]
    if not isinstance(given, list):
        raise RewardFailed(f'{url}: "{key}" is no list: {shown(given)}')
    if len(given) != num_rows:
        raise RewardFailed(f"{url}: {len(given)} {key} for {num_rows} rows")
    scores, numbers = [], []
    for place, element in enumerate(given):
        score = _score_of(element) if key == "scores" else _score_of_result(element)
        if score.error:
            score.error = f"{url}: {key}[{place}]: {score.error}"
        elif key == "results" and isinstance(metrics := element.get("metrics"), Mapping):
            numbers.append(metrics)
        scores.append(score)
    return Scored(scores, metrics=extra_metrics(numbers))


def _score_of_result(result: Any) -> reward_pb2.RowScore:
    if not isinstance(result, Mapping) or "score" not in result:
        return reward_pb2.RowScore(error=f'no object with "score": {shown(result)}')
    metrics, error = result.get("metrics"), result.get("error")
    if metrics is not None and not isinstance(metrics, Mapping):
        return reward_pb2.RowScore(error=f'"metrics" is no object: {shown(metrics)}')
    if error is not None:
        is_text = isinstance(error, str) and error
        return reward_pb2.RowScore(error=encodable(error[:MAX_SHOWN]) if is_text else shown(error))
    return _score_of(result["score"])


def _score_of(value: Any) -> reward_pb2.RowScore:
    if value is None:
        return reward_pb2.RowScore(error="no score (null)")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int | float) for each in values):
        return reward_pb2.RowScore(error=f"score is not a number: {shown(value)}")
    return row_score(value)
