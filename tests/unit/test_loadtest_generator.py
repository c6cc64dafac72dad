"""How a step ends that cannot go on: its figures are of the time in which calls were sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest import generator
from loadtest.caller import Reply
from loadtest.generator import Generator, Sending
from loadtest.recorder import StepRecorder, Window
from loadtest.schedule import constant

DRAIN_S = 1.0


class NeverAnswers:
    """A caller whose calls last longer than any test."""

    async def call(self) -> Reply:
        await asyncio.sleep(3600)
        raise AssertionError

    async def release(self) -> None: ...


async def overrun_step() -> tuple[Sending, StepRecorder]:
    now_s = asyncio.get_running_loop().time()
    recorder = StepRecorder(Window(now_s, now_s + 60), 1.0)
    caller: Any = NeverAnswers()
    sending = await Generator(caller, recorder, DRAIN_S, asyncio.Event()).open_loop(now_s, constant(200))
    return sending, recorder


def test_a_step_that_overruns_is_measured_until_it_stops_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "MOST_OUTSTANDING", 20)
    sending, recorder = asyncio.run(overrun_step())
    assert sending.overrun
    assert recorder.sent == 20
    assert 0.1 <= recorder.window.length_s < DRAIN_S
