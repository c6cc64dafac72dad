"""Sends calls, in an open loop or a closed one, and ends in bounded time.

Open loop: calls are due at moments that were decided beforehand, and latency counts from then. A stall counts
against every call that was due meanwhile, as for real clients (no coordinated omission). Closed loop: each caller sends
its next call when it has the answer to its last.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.caller import SETTLE_S, Caller, Reply
from loadtest.recorder import UNFINISHED, StepRecorder

MOST_OUTSTANDING = 10_000
"""Unanswered calls at which an open loop ends its step: the service is far beyond its capacity."""
RELEASE_EVERY_S = 0.5


@dataclass
class Sending:
    """Outcome of the sending of a step's calls.

    Attributes:
        overrun: Whether the step ended early because too many calls had no answer or could not be sent in time.
        interrupted: Whether the step was asked to stop.
        busy: Share of the window in which the thread of the event loop used the CPU, from 0 to 1.
    """

    overrun: bool = False
    interrupted: bool = False
    busy: float = 0.0


class Generator:
    """Sends the calls of one step, in a running event loop; made for one call of `open_loop` or `closed_loop`. Both
    then wait for answers, cancel the calls that have none, record them as unfinished, and raise errors of this code.

    Args:
        caller: Makes the calls.
        recorder: Records the calls.
        drain_s: Longest time, in seconds, to wait for answers after the last call.
        stop: Event that ends the step: when it is set, nothing more is sent or waited for.
    """

    def __init__(self, caller: Caller, recorder: StepRecorder, drain_s: float, stop: asyncio.Event) -> None:
        self._caller = caller
        self._recorder = recorder
        self._drain_s = drain_s
        self._stop = stop
        self._calls: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._sending = Sending()
        self._given_up = False
        self._failures: list[BaseException] = []

    async def open_loop(self, start_s: float, offsets: Iterator[float]) -> Sending:
        """Sends a call at each offset, in seconds from `start_s` on the event loop's clock, until the recorder's window
        ends, or earlier where `MOST_OUTSTANDING` calls have no answer or the sends are too late."""
        return await self._run(self._send_on_time(start_s, offsets))

    async def closed_loop(self, callers: int) -> Sending:
        """Keeps `callers` calls under way at the same time until the recorder's window ends: each that is answered is
        followed by the next."""
        return await self._run(self._keep_running(callers))

    async def _run(self, sender: Coroutine[Any, Any, None]) -> Sending:
        sending, stopped = asyncio.create_task(sender), asyncio.create_task(self._stop.wait())
        busy = asyncio.create_task(self._measure_busy())
        helpers: list[asyncio.Task[Any]] = [busy, asyncio.create_task(self._release_often())]
        try:
            await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set() or self._sending.overrun:
                # The window ends before the wait for answers begins.
                self._recorder.cut(self._clock())
                busy.cancel()
            if self._calls and not self._stop.is_set():
                helpers.append(asyncio.create_task(asyncio.wait(self._calls)))
                answered = [helpers[-1], stopped]
                await asyncio.wait(answered, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._given_up = True
            await _cancel_all([sending, stopped, *helpers, *self._calls])
        for failure in self._failures:
            raise failure
        if not sending.cancelled():
            sending.result()
        self._sending.interrupted = self._stop.is_set()
        return self._sending

    async def _send_on_time(self, start_s: float, offsets: Iterator[float]) -> None:
        stop_s = self._recorder.window.stop_s
        for due_s in itertools.takewhile(lambda moment: moment < stop_s, (start_s + x for x in offsets)):
            await asyncio.sleep(max(due_s - self._clock(), 0))
            if len(self._calls) >= MOST_OUTSTANDING or self._clock() > stop_s + self._drain_s:
                self._sending.overrun = True
                return
            self._start(self._one(due_s))
        await asyncio.sleep(max(stop_s - self._clock(), 0))

    async def _keep_running(self, callers: int) -> None:
        for _ in range(callers):
            self._start(self._call_on_and_on())
        await asyncio.sleep(max(self._recorder.window.stop_s - self._clock(), 0))

    async def _call_on_and_on(self) -> None:
        while (now := self._clock()) < self._recorder.window.stop_s:
            await self._one(now)

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (failure := task.exception()):
            self._failures.append(failure)

    async def _one(self, due_s: float) -> None:
        sent_s = self._clock()
        self._recorder.begin(due_s, sent_s)
        reply = Reply(UNFINISHED)
        try:
            reply = await self._caller.call()
        finally:
            self._note_end(due_s, sent_s, reply)

    def _note_end(self, due_s: float, sent_s: float, reply: Reply) -> None:
        """Records the end of a call with its reply. Once the wait for answers is over, records it as unfinished, or not
        at all where the test was interrupted."""
        if not self._given_up:
            self._recorder.end(due_s, sent_s, self._clock(), reply)
        elif not self._stop.is_set():
            self._recorder.end(due_s, sent_s, self._clock(), Reply(UNFINISHED))

    async def _release_often(self) -> None:
        while True:
            await asyncio.sleep(RELEASE_EVERY_S)
            await self._caller.release()

    async def _measure_busy(self) -> None:
        window = self._recorder.window
        await asyncio.sleep(max(window.start_s - self._clock(), 0))
        computed, began = time.thread_time(), self._clock()
        try:
            await asyncio.sleep(max(window.stop_s - self._clock(), 0))
        finally:
            self._sending.busy = (time.thread_time() - computed) / max(self._clock() - began, 1e-9)


async def _cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SETTLE_S)
