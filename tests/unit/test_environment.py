"""Environments: sync and async methods, time limits, failures of one episode, bounds on what runs at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from controller.config.rollout import EnvironmentTable
from controller.restarts import LOST
from controller.role_groups.futures import on_thread, results
from controller.training import environment
from controller.training.environment import EnvironmentCaller, Episode, environment_factory
from rlhf.errors import ConfigError, RlhfError

ROW = {"prompt": "1+1=", "ground_truth": "2", "metadata": '{"level": 3}'}
Make = Callable[..., EnvironmentCaller]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as opened:

        def make(factory: Callable[..., Any], **keys: Any) -> EnvironmentCaller:
            caller = EnvironmentCaller(factory, EnvironmentTable(factory="mine:Own", **keys))
            opened.callback(caller.close)
            return caller

        yield make


class Echo:
    """Answers with what it was given, and what was said so far."""

    def __init__(self, prompt: str, ground_truth: str, metadata: dict[str, Any], mark: str = "") -> None:
        self.given = f"{prompt}{ground_truth}{metadata['level']:g}{mark}"
        self.said: list[str] = []
        self.is_closed = False

    def step(self, response: str) -> str | None:
        self.said.append(response)
        return None if response == "end" else f"{self.given} {self.said}"

    def reward(self) -> float:
        return float(len(self.said))

    def close(self) -> None:
        self.is_closed = True


class NoStep:
    """Lacks what every environment has."""

    def __init__(self, **row: Any) -> None: ...


class AsyncEcho(Echo):
    async def step(self, response: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(response)

    async def reward(self) -> float:  # type: ignore[override]
        return super().reward()


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_an_environment_keeps_the_state_of_its_episode(make: Make, kind: type[Echo]) -> None:
    caller, episodes = make(kind, options={"mark": "!"}), [Episode(ROW), Episode({**ROW, "prompt": "2+2="})]
    caller.make(episodes)
    assert caller.step(episodes, ["a", "b"]) == ["1+1=23! ['a']", "2+2=23! ['b']"]
    assert caller.step(episodes[1:], ["c"]) == ["2+2=23! ['b', 'c']"]
    assert caller.step(episodes, ["end", "d"]) == [None, "2+2=23! ['b', 'c', 'd']"]
    caller.finish(episodes)
    assert [(e.turns, e.reward, e.error) for e in episodes] == [(2, 2.0, ""), (3, 3.0, "")]
    assert all(e.environment.is_closed for e in episodes)


def test_a_failure_ends_its_episode_alone_and_is_logged_with_its_traceback(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile(Echo):
        def step(self, response: str) -> str | None:
            if response == "bad":
                raise LookupError(f"no page for\n{response}")
            return super().step(response)

    caller, episodes = make(Fragile), [Episode(ROW), Episode(ROW)]
    caller.make(episodes)
    with caplog.at_level(logging.WARNING):
        answers = caller.step(episodes, ["bad", "good"])
    assert answers == [None, "1+1=23 ['good']"]
    assert episodes[0].error == "environment mine:Own: step: LookupError: no page for bad"
    assert "1 of 2 episodes have failed" in caplog.text
    assert 'raise LookupError(f"no page for' in caplog.text
    assert caller.step(episodes, ["good", "good"])[0] is None, "it is not called again"
    caller.finish(episodes)
    assert (episodes[0].reward, episodes[1].reward) == (None, 2.0)
    assert episodes[0].environment.is_closed


def test_an_environment_that_exits_fails_its_episode(make: Make) -> None:
    class Exits(Echo):
        def step(self, response: str) -> str | None:
            raise SystemExit(3)

    caller, episodes = make(Exits), [Episode(ROW)]
    caller.make(episodes)
    assert caller.step(episodes, ["a"]) == [None]
    assert episodes[0].error == "environment mine:Own: step: RuntimeError: called sys.exit(3)"


def test_an_environment_that_cannot_be_made_fails_its_episode(make: Make) -> None:
    def refuse(**row: Any) -> None:
        raise ValueError("no such level")

    caller, episodes = make(refuse), [Episode(ROW)]
    caller.make(episodes)
    assert caller.step(episodes, ["a"]) == [None]
    caller.finish(episodes)
    assert episodes[0].error == "environment mine:Own: ValueError: no such level"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_takes_too_long_fails_its_episode(make: Make, is_async: bool) -> None:
    released = threading.Event()

    class Slow(Echo):
        def step(self, response: str) -> Any:
            if response != "slow":
                return super().step(response)
            return asyncio.sleep(60) if is_async else released.wait(60)

    caller, episodes = make(Slow, timeout_s=0.2, concurrency=1), [Episode(ROW) for _ in range(3)]
    caller.make(episodes)
    began = time.monotonic()
    answers = caller.step(episodes, ["slow", "a", "slow"])
    assert time.monotonic() - began < 30
    assert answers == [None, "1+1=23 ['a']", None]
    assert [e.error for e in episodes[::2]] == [
        "environment mine:Own: step: no answer within timeout_s, 0.2"
    ] * 2
    released.set()


def test_an_environment_that_is_made_after_its_timeout_is_closed(make: Make) -> None:
    released, closed = threading.Event(), threading.Event()

    class Late(Echo):
        def __init__(self, *arguments: Any, **row: Any) -> None:
            super().__init__(*arguments, **row)
            released.wait(60)

        def close(self) -> None:
            closed.set()

    caller, episodes = make(Late, timeout_s=0.2), [Episode(ROW)]
    caller.make(episodes)
    assert episodes[0].error == "environment mine:Own: no answer within timeout_s, 0.2"
    assert not closed.is_set()
    released.set()
    assert closed.wait(30)


class LateStep(Echo):
    """A step that takes too long; notes whether it still ran when the environment was closed."""

    def __init__(self, *arguments: Any, released: threading.Event, **row: Any) -> None:
        super().__init__(*arguments, **row)
        self.released, self.is_stepping, self.was_stepping = released, False, False

    def step(self, response: str) -> None:
        self.is_stepping = True
        self.released.wait(60)
        self.is_stepping = False

    def close(self) -> None:
        super().close()
        self.was_stepping = self.is_stepping


def test_an_environment_is_closed_after_a_step_that_took_too_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def wait_for_the_step(running: list[Future[Any]], timeout_s: float) -> None:
        assert timeout_s == 0.2
        released.set()
        assert not wait(running, 30).not_done

    monkeypatch.setattr(environment, "wait", wait_for_the_step, raising=False)
    caller, episodes = make(LateStep, timeout_s=0.2, options={"released": released}), [Episode(ROW)]
    caller.make(episodes)
    caller.step(episodes, ["a"])
    assert episodes[0].error == "environment mine:Own: step: no answer within timeout_s, 0.2"
    caller.finish(episodes)
    assert episodes[0].environment.is_closed
    assert not episodes[0].environment.was_stepping


def test_an_environment_whose_step_hangs_is_closed_beside_it(make: Make) -> None:
    released = threading.Event()
    caller, episodes = make(LateStep, timeout_s=0.2, options={"released": released}), [Episode(ROW)]
    caller.make(episodes)
    caller.step(episodes, ["a"])
    caller.finish(episodes)
    assert episodes[0].environment.is_closed
    assert episodes[0].environment.was_stepping
    released.set()


def test_an_async_method_that_blocks_the_event_loop_ends_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "LATE_S", 0.2)
    released = threading.Event()

    class Blocking(Echo):
        async def step(self, response: str) -> None:  # type: ignore[override]
            released.wait(30)

    caller, episodes = make(Blocking, timeout_s=0.1), [Episode(ROW)]
    caller.make(episodes)
    with pytest.raises(RlhfError, match="an async method of mine:Own blocks its event loop") as caught:
        caller.step(episodes, ["a"])
    assert not isinstance(caught.value, LOST), "a restart would repeat it"
    released.set()


def counting() -> tuple[type[Echo], list[int]]:
    """Returns an environment, and a list with the largest number of its steps that ran at a time."""
    running, most = [0], [0]

    class Counted(Echo):
        async def step(self, response: str) -> str | None:  # type: ignore[override]
            running[0] += 1
            most[0] = max(most[0], running[0])
            await asyncio.sleep(0.01)
            running[0] -= 1
            return super().step(response)

    return Counted, most


def test_at_most_as_many_calls_as_allowed_run_at_a_time(make: Make) -> None:
    counted, most = counting()
    caller, episodes = make(counted, concurrency=3), [Episode(ROW) for _ in range(10)]
    caller.make(episodes)
    caller.step(episodes, ["a"] * 10)
    assert most == [3]


def test_an_evaluation_beside_a_step_calls_no_more_environments_at_a_time(make: Make) -> None:
    counted, most = counting()
    caller, both = make(counted, concurrency=3), [[Episode(ROW) for _ in range(10)] for _ in range(2)]
    for episodes in both:
        caller.make(episodes)
    results([on_thread(partial(caller.step, episodes, ["a"] * 10), "step") for episodes in both], 10)
    assert most == [3]
    assert not any(episode.error for episodes in both for episode in episodes)


def test_calls_that_come_first_may_take_their_time_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LATE_S", 0.0)
    begun = threading.Event()

    class Slow(Echo):
        async def step(self, response: str) -> str | None:  # type: ignore[override]
            begun.set()
            await asyncio.sleep(0.15)
            return super().step(response)

    caller, first, second = make(Slow, timeout_s=0.2, concurrency=1), *([Episode(ROW)] for _ in range(2))
    first = [*first, *(Episode(ROW) for _ in range(3))]
    for episodes in (first, second):
        caller.make(episodes)
    slow = on_thread(partial(caller.step, first, ["a"] * 4), "step")
    assert begun.wait(10)
    assert caller.step(second, ["b"]) == ["1+1=23 ['b']"]
    results([slow], 10)


@pytest.mark.parametrize("answer", [7, b"text", [], ["text"], [{"role": "tool"}]])
def test_an_answer_of_another_kind_fails_the_episode(make: Make, answer: Any) -> None:
    class Odd(Echo):
        def step(self, response: str) -> Any:
            return answer

    caller, episodes = make(Odd), [Episode(ROW)]
    caller.make(episodes)
    assert caller.step(episodes, ["a"]) == [None]
    assert "allowed: a text, a list of messages (with role and content), or None" in episodes[0].error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([{"role": "tool", "content": None}], "role and content of a message must be texts"),
        ([{"role": "tool", "content": {"sum": 2}}], "role and content of a message must be texts"),
        ([{"role": "tool", "content": "\ud800"}], "no valid Unicode: surrogates not allowed"),
        ("\ud800", "no valid Unicode: surrogates not allowed"),
    ],
)
def test_an_answer_that_cannot_be_sent_fails_the_episode(make: Make, answer: Any, said: str) -> None:
    class Odd(Echo):
        def step(self, response: str) -> Any:
            return answer

    caller, episodes = make(Odd), [Episode(ROW)]
    caller.make(episodes)
    assert caller.step(episodes, ["a"]) == [None]
    assert said in episodes[0].error


def test_an_iterator_that_is_at_its_end_fails_the_episode_at_once(make: Make) -> None:
    class Exhausted(Echo):
        def step(self, response: str) -> Any:
            return next(iter(()))

    caller, episodes = make(Exhausted, timeout_s=5.0), [Episode(ROW)]
    caller.make(episodes)
    assert caller.step(episodes, ["a"]) == [None]
    assert episodes[0].error == "environment mine:Own: step: RuntimeError: raised StopIteration"


@pytest.mark.parametrize("reward", ["much", "1", float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_fails_the_episode(make: Make, reward: Any) -> None:
    class Odd(Echo):
        def reward(self) -> Any:
            return reward

    caller, episodes = make(Odd), [Episode(ROW)]
    caller.make(episodes)
    caller.finish(episodes)
    assert episodes[0].reward is None
    assert "allowed: a finite number, or None" in episodes[0].error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Own", "rollout.environment.factory: .*no_such_module"),
        ("json:decoder", "rollout.environment.factory: json:decoder cannot be called"),
        (f"{__name__}:NoStep", rf"rollout.environment.factory: {__name__}:NoStep has no method step"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        environment_factory(EnvironmentTable(factory=name))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"marc": "!"}, "rollout.environment.options: .*Echo.* cannot be called .*'marc'"),
        ({"metadata": {}}, "rollout.environment.options: metadata: fields of the row, no options"),
    ],
)
def test_options_that_the_factory_does_not_take_are_refused(options: dict[str, Any], said: str) -> None:
    table = EnvironmentTable(factory=f"{__name__}:Echo", options=options)
    with pytest.raises(ConfigError, match=said):
        environment_factory(table)
    assert environment_factory(table.model_copy(update={"options": {"mark": "!"}})) is not None
