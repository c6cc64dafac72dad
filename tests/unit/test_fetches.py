"""Rows of calls on their way to a rank: a fetch that nobody waits for holds up no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from rlhf.errors import TransferError
from services.runtime import fetches
from services.runtime.fetches import FetchQueue
from services.runtime.worker import NO_ROWS, CallRows


def nothing() -> CallRows:
    return NO_ROWS


class Held:
    """A fetch that hangs until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self) -> CallRows:
        self.begun.set()
        assert self.released.wait(20)
        return NO_ROWS


def with_a_queue(test: Callable[[FetchQueue, Held], Awaitable[None]]) -> None:
    held = Held()

    async def main() -> None:
        queue = FetchQueue(set())
        try:
            await asyncio.wait_for(test(queue, held), 20)
        finally:
            held.released.set()
            queue.close()

    asyncio.run(main())


def test_fetches_run_one_at_a_time_in_their_order() -> None:
    order: list[int] = []

    async def test(queue: FetchQueue, held: Held) -> None:
        first = queue.add(held)
        others = [queue.add(lambda number=number: order.append(number) or NO_ROWS) for number in range(3)]
        await asyncio.to_thread(held.begun.wait, 20)
        assert order == []
        held.released.set()
        await asyncio.gather(first, *others)

    with_a_queue(test)
    assert order == [0, 1, 2]


def test_fetches_behind_one_that_is_dropped_while_it_hangs_go_on() -> None:
    async def test(queue: FetchQueue, held: Held) -> None:
        hanging, behind = queue.add(held), queue.add(nothing)
        await asyncio.to_thread(held.begun.wait, 20)
        queue.drop(hanging)
        assert await behind is NO_ROWS
        assert hanging.cancelled()
        held.released.set()
        assert await queue.add(nothing) is NO_ROWS

    with_a_queue(test)


def test_a_fetch_that_is_dropped_before_it_starts_never_does() -> None:
    async def test(queue: FetchQueue, held: Held) -> None:
        first = queue.add(held)
        dropped = queue.add(lambda: pytest.fail("nobody waits for these rows"))
        last = queue.add(nothing)
        queue.drop(dropped)
        held.released.set()
        await asyncio.gather(first, last)
        assert dropped.cancelled()

    with_a_queue(test)


def test_a_fetch_that_fails_holds_up_no_other() -> None:
    def fail() -> CallRows:
        raise TransferError("no transport")

    async def test(queue: FetchQueue, held: Held) -> None:
        failed, behind = queue.add(fail), queue.add(nothing)
        assert await behind is NO_ROWS
        with pytest.raises(TransferError, match="no transport"):
            await failed
        queue.drop(failed)

    with_a_queue(test)


def test_fetches_that_were_dropped_while_they_ran_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps a thread and a connection until its deadline, also where its session has ended."""
    monkeypatch.setattr(fetches, "MOST_ABANDONED", 3)
    abandoned: fetches.Abandoned = set()
    helds = [Held() for _ in range(6)]

    async def main() -> None:
        queue = FetchQueue(abandoned)
        try:
            for held in helds:
                rows = queue.add(held)
                await asyncio.to_thread(held.begun.wait, 1)
                queue.drop(rows)
            assert [held.begun.is_set() for held in helds] == [True] * 4 + [False] * 2
            assert len(abandoned) == 3
            last = queue.add(nothing)
            for held in helds:
                held.released.set()
            assert await asyncio.wait_for(last, 20) is NO_ROWS
        finally:
            for held in helds:
                held.released.set()
            queue.close()
        if abandoned:
            await asyncio.wait(abandoned.copy())
        assert not abandoned

    asyncio.run(asyncio.wait_for(main(), 30))
