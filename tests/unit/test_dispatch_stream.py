"""A stream of calls whose client does not read its answers takes a bounded amount of memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.v1 import worker_pb2
from services.runtime import dispatch
from services.runtime.dispatch import DispatchStream


class Context:
    """The gRPC context of a client that sends `messages` and reads no answer before it may."""

    def __init__(self, messages: int) -> None:
        self._left, self.read_so_far = messages, 0
        self.may_read, self.answers = asyncio.Event(), list[worker_pb2.DispatchResponse]()

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def read(self) -> bytes | None:
        if not self._left:
            return None
        self._left -= 1
        self.read_so_far += 1
        await asyncio.sleep(0)
        request = worker_pb2.DispatchRequest(number=self.read_so_far, method="/a.B/Known", timeout_s=100)
        return request.SerializeToString()

    async def write(self, answer: worker_pb2.DispatchResponse) -> None:
        await self.may_read.wait()
        self.answers.append(answer)


class Response:
    """A remembered response, which counts how often it was serialized."""

    serialized = 0

    def SerializeToString(self) -> bytes:
        self.serialized += 1
        return b"response"


async def stream_of(
    context: Context, response: Response, monkeypatch: pytest.MonkeyPatch
) -> asyncio.Task[None]:
    known: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    guard: Any = SimpleNamespace(granted=lambda context: None)
    queue: Any = SimpleNamespace(wait=lambda call_id, response, hold: response)
    stream = DispatchStream(queue, {}, lambda *a: None, guard, context)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(stream, "_start", lambda message: (known, "call"))
    task = asyncio.create_task(stream.serve())
    await turns(1000)
    known.set_result(response)
    await turns(1000)
    return task


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_answers_are_serialized_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        context, response = Context(100), Response()
        task = await stream_of(context, response, monkeypatch)
        assert context.read_so_far == 100
        assert response.serialized == 1
        context.may_read.set()
        await task
        assert sorted(answer.number for answer in context.answers) == list(range(1, 101))
        assert {answer.response for answer in context.answers} == {b"response"}

    asyncio.run(run())


def test_a_stream_with_many_unread_answers_is_not_read_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(dispatch, "MOST_ANSWERS", 5)
        context = Context(100)
        task = await stream_of(context, Response(), monkeypatch)
        assert context.read_so_far <= 7
        context.may_read.set()
        await task
        assert len(context.answers) == 100

    asyncio.run(run())
