"""Generation of responses of several turns, between which an environment answers. A row is a whole episode."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

import numpy as np

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.malformed import MalformedRow
from controller.data.prompt_form import NoTemplate
from controller.data.tool_calls import tools_of
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.training.columns import count_tokens, texts_of
from controller.training.environment import Answer, EnvironmentCaller, Episode, environment_factory
from nccl_transfer.refs.batch import Batch, LocalColumn
from rlhf.errors import ConfigError, DeadlineExceeded, InvalidRequest

PARTIAL = {
    "response_ids": "partial_ids",
    "response_mask": "partial_mask",
    "rollout_log_probs": "partial_log_probs",
}
"""Columns that a turn makes, by the names under which the next one is given them."""
ERRORS, TURNS, FINISHED = "environment_error", "episode_turns", "episode_finished"
"""Columns of episodes: why each failed, its number of turns, and 1 where its last turn ended with an end-of-sequence
token or a stop string, else 0."""
REWARD = "environment_reward"
"""Field of their metadata with the reward that the environment gave."""
TEXTS = ("prompt", "ground_truth", "metadata")
MAX_OBSERVATION = 262_144
"""Most characters of an observation; a service tokenizes no longer texts."""

Generate = Callable[[FutureBatch], FutureBatch]


class EpisodePlayer:
    """Plays episodes: generates a turn of each, calls the environments, and continues episodes that get an answer.

    Args:
        config: Configuration of the run, with a factory of environments.
        caller: Calls the environments.
        started_unix_s: Start of the run, Unix time in seconds, which chat templates may use. Default: now.
    """

    def __init__(
        self, config: Config, caller: EnvironmentCaller, started_unix_s: float | None = None
    ) -> None:
        self._table = config.rollout.environment
        options = config.data.chat_options
        self._chat = Chat(config.tokenizer, started_unix_s, options) if config.tokenizer else None
        self._caller = caller

    @classmethod
    def of(
        cls, config: Config, resources: contextlib.ExitStack, started_unix_s: float | None = None
    ) -> Self | None:
        """Returns the player of a configuration, which is closed with `resources`; None where it has no environment.
        `started_unix_s`: as of the class. Raises ConfigError where the environment cannot be imported."""
        factory = environment_factory(config.rollout.environment)
        if factory is None:
            return None
        caller = EnvironmentCaller(factory, config.rollout.environment)
        resources.callback(caller.close)
        return cls(config, caller, started_unix_s)

    def play(self, prompts: FutureBatch, generate: Generate) -> FutureBatch:
        """Returns the columns that `generate` makes, of whole episodes, and columns `ERRORS`, `TURNS`, `FINISHED` and
        metadata. Waits until all episodes have ended.

        Args:
            prompts: Rows with column prompt.
            generate: Generates one turn of rows with column prompt, after the first turn also columns `PARTIAL` and
                observation. Makes columns `PARTIAL`, turn, the text, and turn_end, why it ended.

        Raises:
            RlhfError: A call of the service failed, or there is no chat template for messages.
        """
        # Waits without the step, so that its gates stay closed: all turns are generated with the same weights.
        texts = {name: texts_of(prompts.of_step(None), name) for name in TEXTS if name in prompts}
        rows_of = [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]
        episodes = [Episode(row) for row in rows_of]
        try:
            return self._played(prompts, episodes, generate)
        except BaseException:
            with contextlib.suppress(DeadlineExceeded):  # the first error counts
                self._caller.end(episodes)
            raise

    def _played(self, prompts: FutureBatch, episodes: list[Episode], generate: Generate) -> FutureBatch:
        """As `play`; leaves environments open where it fails."""
        seconds = 0.0
        active, rows = np.arange(prompts.rows), prompts.select(["prompt"])
        parts: list[FutureBatch] = []
        order: list[np.ndarray] = []
        calls: list[Future[CallRecord]] = []
        seconds += _timed(lambda: self._caller.make(episodes))
        for turn in range(self._table.turns):
            made = generate(rows)
            calls += made.calls
            said, ends = (texts_of(made.of_step(None), name) for name in ("turn", "turn_end"))
            observations, took = self._answers([episodes[row] for row in active], said, ends)
            seconds += took
            is_last = turn + 1 == self._table.turns
            goes_on = np.asarray([text is not None and not is_last for text in observations])
            going, ended = np.flatnonzero(goes_on), np.flatnonzero(~goes_on)
            if len(ended):
                parts.append(made.take(ended).drop("turn", "turn_end"))
                order.append(active[ended])
            if not len(going):
                break
            begun = made.select(PARTIAL).rename(**PARTIAL).take(going)
            answered = FutureBatch.of(observation=[observations[row] or "" for row in going])
            active = active[going]
            rows = prompts.take(active).select(["prompt"]) | begun | answered
        seconds += _timed(lambda: self._caller.finish(episodes))
        if prompts.step:
            prompts.step.note("time/environment_s", seconds)
        whole = FutureBatch.concat(parts).take(np.argsort(np.concatenate(order)))
        whole = replace(whole, calls=tuple(dict.fromkeys(calls)), step=prompts.step)
        return whole | _outcomes(episodes)

    def _answers(
        self, episodes: Sequence[Episode], said: Sequence[str], ends: Sequence[str]
    ) -> tuple[list[str | None], float]:
        """Returns the observation that follows each turn, None for an episode that has ended, and the time that the
        environments took, in seconds. Episodes without a turn have ended before it."""
        playing = [row for row, end in enumerate(ends) if end in ("stop", "length")]
        for row in playing:
            episodes[row].is_finished = ends[row] == "stop"
        for episode, end in zip(episodes, ends, strict=True):
            if end not in ("stop", "length", ""):
                self._fail(episode, end)
        started = time.monotonic()
        answers = self._caller.step([episodes[row] for row in playing], [said[row] for row in playing])
        seconds = time.monotonic() - started
        observations: list[str | None] = [None] * len(episodes)
        for row, answer in zip(playing, answers, strict=True):
            try:
                observations[row] = self._rendered(answer, episodes[row])
            except NoTemplate:
                raise
            except ConfigError as error:  # which these messages may have caused alone
                self._fail(episodes[row], str(error))
        return observations, seconds

    def _fail(self, episode: Episode, cause: str) -> None:
        """Ends an episode whose environment returned what cannot be added to the response."""
        episode.error = f"environment {self._table.factory}: step: {cause}"
        logging.warning("an episode has failed: %s", episode.error)

    def _rendered(self, answer: Answer, episode: Episode) -> str | None:
        """Returns the text that an answer adds to the response of its episode. Raises ConfigError where it cannot be
        rendered, and NoTemplate where there is no chat template."""
        if answer is None or isinstance(answer, str):
            text = answer
        elif self._chat is None:
            raise NoTemplate(
                f"{self._table.factory} returned messages, and no service has a model directory with a chat template"
            )
        else:
            text = self._chat.continuation(answer, _tools_of(episode))
        if text and len(text) > MAX_OBSERVATION:
            raise ConfigError(
                f"returned {len(text)} characters; at most {MAX_OBSERVATION} are added to a response"
            )
        return text


def rows_that_ended(batch: FutureBatch) -> np.ndarray:
    """Waits for the responses, and returns the indices of the rows [n] int64 whose response, or the last turn of whose
    episode, ended with an end-of-sequence token or a stop string, also as the last token that it could have; the others
    were cut off. Raises InvalidRequest where the batch has neither column `FINISHED` nor turn_end."""
    if FINISHED in batch:
        finished = batch.result([FINISHED])[FINISHED]
        assert isinstance(finished, LocalColumn), "the controller plays the episodes"
        return np.flatnonzero(np.asarray(finished.values))
    return np.flatnonzero([end == "stop" for end in texts_of(batch, "turn_end")])


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Returns the metrics of the episodes of a step, empty where rows are no episodes: `episode/turns_mean`;
    `episode/finished`, the share of those whose last turn ended with an end-of-sequence token or a stop string;
    `episode/failed`, the share of those whose environment has failed; and `episode/sampled_mean`, the number of tokens
    that the policy sampled."""
    if TURNS not in batch.columns or not batch.rows:
        return {}
    turns, finished, errors = (batch[name] for name in (TURNS, FINISHED, ERRORS))
    assert isinstance(turns, LocalColumn), "the controller plays the episodes"
    assert isinstance(finished, LocalColumn), "the controller plays the episodes"
    assert isinstance(errors, LocalColumn), "the controller plays the episodes"
    return {
        "episode/turns_mean": float(np.mean(np.asarray(turns.values))),
        "episode/finished": float(np.mean(np.asarray(finished.values))),
        "episode/failed": sum(map(bool, errors.texts)) / batch.rows,
        "episode/sampled_mean": count_tokens(batch, "rollout_log_probs") / batch.rows,
    }


def _tools_of(episode: Episode) -> list[Any] | None:
    """Returns the JSON schemas of the tools of an episode's row; None where it has none, or something else in their
    field, as rows may whose prompt is a text."""
    try:
        return tools_of(json.loads(episode.row.get("metadata") or "{}"))
    except MalformedRow:
        return None


def _outcomes(episodes: Sequence[Episode]) -> FutureBatch:
    """Returns columns `ERRORS`, `TURNS`, `FINISHED` and metadata of episodes that have ended."""
    return FutureBatch.of(
        **{ERRORS: [episode.error for episode in episodes]},
        **{TURNS: np.asarray([episode.turns for episode in episodes], np.float64)},
        **{FINISHED: np.asarray([episode.is_finished for episode in episodes], np.float64)},
        metadata=[_with_reward(episode) for episode in episodes],
    )


def _with_reward(episode: Episode) -> str:
    """Returns the metadata of an episode's row with the reward of its environment in field `REWARD`, if there is
    one. Raises InvalidRequest where the row has a field of this name."""
    text = episode.row.get("metadata") or "{}"
    metadata = json.loads(text)
    if REWARD in metadata:  # a reward function would take it for that of the environment
        raise InvalidRequest(
            f"a row of the data has a field {REWARD!r}, which the environment's reward needs"
        )
    if episode.reward is None:
        return text
    return json.dumps({**metadata, REWARD: episode.reward})


def _timed(work: Callable[[], None]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started
