"""The event loop of the controller."""

from __future__ import annotations

import asyncio
import sys

import pytest

from controller.role_groups.loop import Loop

DEADLINE_S = 60.0


async def exits() -> None:
    sys.exit(3)


async def waits_for_one_that_exits() -> None:
    await asyncio.ensure_future(exits())


async def answers() -> int:
    await asyncio.sleep(0)
    return 7


@pytest.mark.parametrize("work", [exits, waits_for_one_that_exits])
def test_a_task_that_exits_ends_alone_and_not_the_loop(work) -> None:
    loop = Loop()
    try:
        ended = loop.start(work())
        assert isinstance(ended.exception(DEADLINE_S), SystemExit)
        assert loop.run(answers(), DEADLINE_S) == 7
    finally:
        loop.close()
    assert not loop._thread.is_alive()
