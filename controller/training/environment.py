"""Environments: objects of the user that answer the turns of episodes, called concurrently and with a timeout."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from controller.config.rollout import EnvironmentTable
from controller.data.chat import Messages
from controller.role_groups.futures import Promise, on_thread, pass_on, results, then
from controller.role_groups.loop import Loop
from rlhf.errors import ConfigError, DeadlineExceeded, RlhfError
from rlhf.plugins import PluginError, load_object

LATE_S = 30.0
"""Longest time, in seconds, that the calls of a turn may take together past their timeouts. Only an `async` method that
blocks its event loop takes longer."""

Answer = str | Messages | None
"""Answer of an environment to a turn: a text or messages, which are appended to the response; None ends the
episode."""
T = TypeVar("T")


class EnvironmentFailed(Exception):
    """A call of an environment failed or took too long.

    Args:
        message: The text, one line.
        running: Resolved when a call that took too long returns from its thread. Default: it runs on none.
    """

    def __init__(self, message: str, running: Future[Any] | None = None) -> None:
        super().__init__(message)
        self.running = running


@dataclass(eq=False)
class Episode:
    """One episode.

    Attributes:
        row: Texts of its row: prompt, ground_truth and metadata, a JSON object.
        environment: Object of the user; None before it is made.
        turns: Number of turns so far.
        is_finished: Whether the last turn ended with an end-of-sequence token or a stop string.
        reward: Reward that the environment has given; None where it has none to give.
        error: Why a call of the environment failed, which has ended the episode; empty where none has.
        running: Resolved when a call that took too long returns from its thread; None where none has.
        is_closed: Whether the environment's method `close` was called.
    """

    row: Mapping[str, str]
    environment: Any = None
    turns: int = 0
    is_finished: bool = False
    reward: float | None = None
    error: str = ""
    running: Future[Any] | None = None
    is_closed: bool = False


def environment_factory(table: EnvironmentTable) -> Callable[..., Any] | None:
    """Imports the factory of `[rollout.environment]`; None where it names none. Raises ConfigError where it cannot be
    imported, or cannot be called with a row and the options, or is a class without a method `step`."""
    if not table.factory:
        return None
    try:
        found = load_object(table.factory, object)
    except PluginError as error:
        raise ConfigError(f"rollout.environment.factory: {error}") from error
    if not callable(found):
        raise ConfigError(f"rollout.environment.factory: {table.factory} cannot be called")
    if isinstance(found, type) and not callable(getattr(found, "step", None)):
        raise ConfigError(f"rollout.environment.factory: {table.factory} has no method step")
    row = {"prompt": "", "ground_truth": "", "metadata": {}}
    if taken := sorted(row.keys() & table.options.keys()):
        raise ConfigError(f"rollout.environment.options: {', '.join(taken)}: fields of the row, no options")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of an extension module
        return found
    try:
        signature.bind(**row, **table.options)
    except TypeError as error:
        raise ConfigError(
            f"rollout.environment.options: {table.factory}{signature} cannot be called with prompt, ground_truth, "
            f"metadata and options {sorted(table.options)}: {error}"
        ) from None
    return found


class EnvironmentCaller:
    """Calls the environments of episodes, at most `concurrency` at a time, each call for at most `timeout_s`. `async`
    methods run on one event loop, others on a thread each. A call that fails ends its episode alone. Thread-safe: an
    evaluation may play episodes beside a step (`run.ahead`).

    Args:
        factory: Makes the environment of an episode.
        table: The table `[rollout.environment]`.
    """

    def __init__(self, factory: Callable[..., Any], table: EnvironmentTable) -> None:
        self._factory, self._table = factory, table
        self._loop = Loop(asyncio.new_event_loop(), "environment")
        self._free = asyncio.Semaphore(table.concurrency)
        self._asked, self._lock = 0, threading.Lock()

    def make(self, episodes: Sequence[Episode]) -> None:
        """Makes the environments of episodes. One that is made after its timeout is closed at once."""

        async def make(episode: Episode) -> None:
            row = {**episode.row, "metadata": json.loads(episode.row.get("metadata") or "{}")}
            work = partial(self._factory, **row, **self._table.options)
            try:
                episode.environment = await self._call(work, "")
            except EnvironmentFailed as failed:
                if failed.running:
                    then(failed.running, _close)
                raise

        self._each(make, episodes)

    def step(self, episodes: Sequence[Episode], said: Sequence[str]) -> list[Answer]:
        """Returns the answer of each environment to what the policy said in a turn; None for episodes that have
        failed."""
        answers: dict[int, Answer] = {}
        texts = {id(episode): text for episode, text in zip(episodes, said, strict=True)}

        async def step(episode: Episode) -> None:
            episode.turns += 1
            work = partial(episode.environment.step, texts[id(episode)])
            answers[id(episode)] = _checked(await self._call(work, "step"))

        self._each(step, episodes)
        return [answers.get(id(episode)) for episode in episodes]

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Gets the reward of each environment that has a method `reward`, and closes those with a method `close`."""

        async def finish(episode: Episode) -> None:
            if hasattr(episode.environment, "reward"):
                episode.reward = _finite(await self._call(episode.environment.reward, "reward"))

        self._each(finish, episodes)
        self.end(episodes)

    def end(self, episodes: Sequence[Episode]) -> None:
        """Closes the environments with a method `close` that are not closed. Where a call that took too long still
        runs, waits for it first, but no longer than `timeout_s`."""
        unclosed = [episode for episode in episodes if not episode.is_closed]
        wait([episode.running for episode in unclosed if episode.running], self._table.timeout_s)

        async def close(episode: Episode) -> None:
            episode.is_closed = True
            if hasattr(episode.environment, "close"):
                await self._call(episode.environment.close, "close")

        self._each(close, unclosed, failed=True)

    def close(self) -> None:
        """Ends the event loop. Calls that are under way on threads are left to end by themselves."""
        self._loop.close()

    def _each(
        self,
        work: Callable[[Episode], Coroutine[Any, Any, None]],
        episodes: Sequence[Episode],
        *,
        failed: bool = False,
    ) -> None:
        """Runs work for each episode that has not failed, and for all that have an environment where `failed`; waits.
        Where it fails, sets the episode's error and logs the first.

        Raises:
            RlhfError: A method blocks the event loop. Of no narrower class: no service is lost, so `Restarts` does not
                repeat it.
        """
        table = self._table
        asked = [e for e in episodes if (e.environment is not None if failed else not e.error)]

        async def run() -> list[BaseException | None]:
            async def one(episode: Episode) -> None:
                async with self._free:
                    await work(episode)

            return await asyncio.gather(*(one(episode) for episode in asked), return_exceptions=True)

        with self._lock:
            self._asked += len(asked)
            # Calls of another thread that are there already come first.
            longest_s = 2 * table.timeout_s * math.ceil(self._asked / table.concurrency) + LATE_S
        try:
            (ended,) = results([self._loop.start(run())], longest_s)
        except DeadlineExceeded:
            raise RlhfError(
                f"rollout.environment: calls have not ended within {longest_s:g} s, although each may take "
                f"timeout_s, {table.timeout_s:g}: an async method of {table.factory} blocks its event loop"
            ) from None
        finally:
            with self._lock:
                self._asked -= len(asked)
        errors = [(episode, error) for episode, error in zip(asked, ended, strict=True) if error]
        for episode, error in errors:
            episode.error = episode.error or f"environment {table.factory}: {error}"
            if isinstance(error, EnvironmentFailed):
                episode.running = error.running
        if errors:
            episode, error = errors[0]
            cause = error.__cause__ or error
            logging.warning(
                "%d of %d episodes have failed; the first, of prompt %r: %s\n%s",
                len(errors),
                len(asked),
                episode.row.get("prompt", "")[-200:],
                episode.error,
                "".join(traceback.format_exception(cause)),
            )

    async def _call(self, work: partial | Callable[[], Any], name: str) -> Any:
        """Coroutine that calls a function of the user, on a thread unless it is a coroutine function.

        Args:
            work: The function.
            name: Its name, for messages.

        Raises:
            EnvironmentFailed: It raised an exception, or did not return in time.
        """
        named, timeout_s = f"{name}: " if name else "", self._table.timeout_s
        function = work.func if isinstance(work, partial) else work
        running = None if asyncio.iscoroutinefunction(function) else _on_thread(work)
        task = asyncio.ensure_future(_result(running or work()))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            raise EnvironmentFailed(f"{named}no answer within timeout_s, {timeout_s:g}", running)
        if task.cancelled():
            raise EnvironmentFailed(f"{named}was cancelled")
        if error := task.exception():
            text = " ".join(str(error).split())
            raise EnvironmentFailed(f"{named}{type(error).__name__}: {text}") from error
        return task.result()


def _on_thread(work: Callable[[], T]) -> Future[T]:
    """Calls a function on a thread; returns a future of its result, which cannot be cancelled, since the thread
    continues after a timeout."""
    ended: Promise[T] = Promise()
    pass_on(on_thread(partial(_without_stop, work), "environment"), ended)
    return ended


async def _result(called: Future[Any] | Awaitable[Any]) -> Any:
    """Coroutine that returns what a call returns; awaits that too where it is awaitable."""
    try:
        made = await (asyncio.wrap_future(called) if isinstance(called, Future) else called)
        return await made if isinstance(made, Awaitable) else made
    except SystemExit as error:  # which would end the event loop
        raise RuntimeError(f"called sys.exit({error.code})") from error


def _close(environment: Any) -> None:
    """Closes an environment that no episode has; a coroutine is dropped, and errors are logged."""
    try:
        close = getattr(environment, "close", None)
        if close and asyncio.iscoroutine(closing := close()):
            closing.close()
    except Exception:
        logging.warning("an environment that was made late cannot be closed", exc_info=True)


def _without_stop(work: Callable[[], T]) -> T:
    """Calls a function; raises RuntimeError where it raises StopIteration, which an asyncio future cannot hold."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("raised StopIteration") from error


def _checked(answer: Any) -> Answer:
    """Returns the answer of an environment; raises EnvironmentFailed where it is none."""
    if answer is None:
        return None
    if isinstance(answer, str):
        _check_encodable(answer)
        return answer
    is_list = isinstance(answer, Sequence) and not isinstance(answer, bytes)
    messages: list[Any] = list(answer) if is_list else []
    if messages and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
        for message in messages:
            # A list has parts of a content, for templates that render these.
            if not isinstance(message["role"], str) or not isinstance(message["content"], str | list):
                raise EnvironmentFailed(f"step: role and content of a message must be texts: {message!r:.80}")
            _check_encodable(str(message["content"]))
        return answer
    raise EnvironmentFailed(
        f"step: returned {answer!r:.80}; allowed: a text, a list of messages (with role and content), or None"
    )


def _check_encodable(text: str) -> None:
    """Raises EnvironmentFailed where a text cannot be sent, as it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailed(f"step: returned a text that is no valid Unicode: {error.reason}") from error


def _finite(reward: Any) -> float | None:
    """Returns the reward of an environment; raises EnvironmentFailed where it is not a finite number or None."""
    try:
        value = None if reward is None else math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise EnvironmentFailed(f"reward: returned {reward!r:.80}; allowed: a finite number, or None")
    return value
