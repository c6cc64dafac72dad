"""Calls that wait for their turns on a rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from rlhf.errors import CallCancelled, Refused
from services.runtime import turn_queue
from services.runtime.turn_queue import TurnQueue

PATIENCE_S = 0.3


def nothing() -> None:
    """The call may wait."""


async def soon() -> None:
    """All tasks that can go on have done so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_queue, "MISSING_S", PATIENCE_S)


def in_a_loop(test: Callable[[TurnQueue], Awaitable[None]]) -> None:
    async def main() -> None:
        queue = TurnQueue()
        queue.begin_session("run")
        await asyncio.wait_for(test(queue), 20)

    asyncio.run(main())


def test_a_missing_number_is_waited_for_from_when_the_rank_is_idle() -> None:
    """A rank that is busy for longer than it waits for a missing call may be why that call has not been sent yet."""

    async def test(queue: TurnQueue) -> None:
        long = queue.join("run", 1)
        assert queue.begin_at_once(long)
        third = queue.join("run", 3)
        waiting = asyncio.create_task(queue.begin(third, time.monotonic() + 20, nothing))
        await asyncio.sleep(2 * PATIENCE_S)
        queue.end(long)
        await soon()
        assert not waiting.done()
        second = queue.join("run", 2)
        assert queue.begin_at_once(second)
        queue.end(second)
        await waiting
        queue.end(third)

    in_a_loop(test)


def test_a_call_passes_over_a_number_that_does_not_come() -> None:
    async def test(queue: TurnQueue) -> None:
        third = queue.join("run", 3)
        began = time.monotonic()
        await queue.begin(third, began + 20, nothing)
        assert time.monotonic() - began > 0.9 * PATIENCE_S
        with pytest.raises(Refused, match=r"3 is next"):
            queue.join("run", 2)
        queue.end(third)

    in_a_loop(test)


def test_a_second_call_by_a_number_is_refused_and_does_not_hold_up_later_ones() -> None:
    async def test(queue: TurnQueue) -> None:
        first = queue.join("run", 1)
        assert queue.begin_at_once(first)
        with pytest.raises(Refused, match="another call's"):
            queue.join("run", 1)
        third = queue.join("run", 3)
        waiting = asyncio.create_task(queue.begin(third, time.monotonic() + 20, nothing))
        queue.end(first)
        await waiting
        queue.end(third)

    in_a_loop(test)


def test_a_call_whose_turn_does_not_come_in_time_gives_it_up() -> None:
    async def test(queue: TurnQueue) -> None:
        first, second, third = (queue.join("run", number) for number in (1, 2, 3))
        assert queue.begin_at_once(first)
        with pytest.raises(TimeoutError):
            await queue.begin(second, time.monotonic() + 0.01, nothing)
        waiting = asyncio.create_task(queue.begin(third, time.monotonic() + 20, nothing))
        await soon()
        assert not waiting.done()
        queue.end(first)
        await waiting
        queue.end(third)

    in_a_loop(test)


def test_a_call_that_may_wait_no_longer_gives_its_turn_up() -> None:
    async def test(queue: TurnQueue) -> None:
        is_cancelled = False

        def check() -> None:
            if is_cancelled:
                raise CallCancelled("not any more")

        first, second, third = (queue.join("run", number) for number in (1, 2, 3))
        assert queue.begin_at_once(first)
        waiting = asyncio.create_task(queue.begin(second, time.monotonic() + 20, check))
        behind = asyncio.create_task(queue.begin(third, time.monotonic() + 20, nothing))
        await soon()
        queue.wake()
        await soon()
        assert not waiting.done()
        is_cancelled = True
        queue.wake()
        with pytest.raises(CallCancelled):
            await waiting
        queue.end(first)
        await behind
        queue.end(third)

    in_a_loop(test)


def test_a_session_waits_for_its_own_missing_numbers_not_for_what_is_left_of_another_s_wait() -> None:
    async def test(queue: TurnQueue) -> None:
        queue.join("run", 3)
        await asyncio.sleep(0.7 * PATIENCE_S)
        queue.end_session("run")
        queue.begin_session("next")
        second = queue.join("next", 2)
        began = time.monotonic()
        await queue.begin(second, began + 20, nothing)
        assert time.monotonic() - began > 0.9 * PATIENCE_S
        queue.end(second)

    in_a_loop(test)


def test_a_missing_number_of_a_session_is_waited_for_while_another_one_s_calls_run() -> None:
    async def test(queue: TurnQueue) -> None:
        queue.begin_session("other")
        second = queue.join("run", 2)
        began = time.monotonic()
        waiting = asyncio.create_task(queue.begin(second, began + 20, nothing))
        number = 0
        while time.monotonic() < began + 2 * PATIENCE_S:
            number += 1
            theirs = queue.join("other", number)
            await queue.begin(theirs, began + 20, nothing)
            await asyncio.sleep(0.05)
            queue.end(theirs)
        await waiting
        assert time.monotonic() < began + 4 * PATIENCE_S
        queue.end(second)

    in_a_loop(test)


def test_a_call_that_does_not_wait_for_its_turn_yet_does_not_hold_up_another_session() -> None:
    async def test(queue: TurnQueue) -> None:
        queue.begin_session("other")
        fetching, running, theirs = queue.join("run", 1), queue.join("other", 1), queue.join("other", 2)
        assert queue.begin_at_once(running)
        waiting = asyncio.create_task(queue.begin(theirs, time.monotonic() + 20, nothing))
        await soon()
        queue.end(running)
        await waiting
        assert queue.heads == []
        late = asyncio.create_task(queue.begin(fetching, time.monotonic() + 20, nothing))
        await soon()
        assert queue.heads == [fetching]
        queue.end(theirs)
        await late
        queue.end(fetching)

    in_a_loop(test)


def test_an_unordered_call_that_does_not_wait_for_its_turn_yet_does_not_hold_up_another_one() -> None:
    """The rows of the first are still fetched, perhaps from a rank that has died."""

    async def test(queue: TurnQueue) -> None:
        running, _, behind = (queue.join("", 0) for _ in range(3))
        assert queue.begin_at_once(running)
        waiting = asyncio.create_task(queue.begin(behind, time.monotonic() + 20, nothing))
        await soon()
        queue.end(running)
        await soon()
        assert waiting.done()
        queue.end(behind)

    in_a_loop(test)


def test_a_call_that_gives_way_waits_again() -> None:
    async def test(queue: TurnQueue) -> None:
        queue.begin_session("other")
        mine, theirs = queue.join("run", 1), queue.join("other", 1)
        assert queue.begin_at_once(mine)
        waiting = asyncio.create_task(queue.begin(theirs, time.monotonic() + 20, nothing))
        await soon()
        queue.await_peers(mine)
        queue.give_way(mine, theirs)
        again = asyncio.create_task(queue.begin(mine, time.monotonic() + 20, nothing))
        await waiting
        await soon()
        assert not again.done()
        queue.end(theirs)
        await again
        queue.end(mine)

    in_a_loop(test)
