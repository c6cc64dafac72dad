"""What a client of a rank does when its stream of calls breaks or says nonsense, against a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from controller import client
from controller.client import RankClient
from rlhf.contract import SERVICES
from rlhf.errors import RlhfError, ServiceLost
from rlhf.v1 import worker_pb2

DISPATCH = SERVICES["worker"]["Dispatch"]
SYNCHRONIZE = SERVICES["worker"]["Synchronize"]
SOON_S = 10.0

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]


@contextlib.asynccontextmanager
async def rank(handler: Handler) -> AsyncIterator[RankClient]:
    """A client of a server whose Dispatch is the handler."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        handler, worker_pb2.DispatchRequest.FromString, worker_pb2.DispatchResponse.SerializeToString
    )
    table = {DISPATCH.name: method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DISPATCH.service, table),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = RankClient("actor", 3, f"127.0.0.1:{port}", session="run")
    try:
        yield made
    finally:
        await made.close()
        await server.stop(None)


def start(made: RankClient) -> asyncio.Future[Any]:
    return made.start(SYNCHRONIZE, worker_pb2.SynchronizeRequest(), SOON_S)


async def read_call(context: Any) -> worker_pb2.DispatchRequest:
    """The next message that is a call."""
    while not (message := await context.read()).method:
        assert message.session == "run"
    return message


def test_a_stream_that_breaks_is_made_anew_also_while_no_call_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "REOPEN_S", 0.01)
    sessions: list[str] = []

    async def main() -> None:
        is_back = asyncio.Event()

        async def handler(_: Any, context: Any) -> None:
            sessions.append((await context.read()).session)
            if len(sessions) < 3:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            is_back.set()
            await context.read()

        async with rank(handler) as made:
            with pytest.raises(
                ServiceLost, match=r"actor rank 3 .* Synchronize: .*(broken|Internal error from Core)"
            ):
                await start(made)
            await is_back.wait()

    asyncio.run(asyncio.wait_for(main(), SOON_S))
    assert sessions == ["run"] * 3


def test_every_call_that_waits_hears_that_the_rank_is_gone_and_the_next_is_sent_again() -> None:
    streams = 0

    async def handler(_: Any, context: Any) -> None:
        nonlocal streams
        streams += 1
        numbers = [(await read_call(context)).number for _ in range(1 if streams > 1 else 2)]
        if streams > 1:
            empty = worker_pb2.SynchronizeResponse().SerializeToString()
            await context.write(worker_pb2.DispatchResponse(number=numbers[0], response=empty))
            await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            lost = await asyncio.gather(start(made), start(made), return_exceptions=True)
            assert [type(error) for error in lost] == [ServiceLost, ServiceLost]
            assert "actor rank 3" in str(lost[0])
            assert await start(made) == worker_pb2.SynchronizeResponse()

    asyncio.run(asyncio.wait_for(main(), SOON_S))


def test_an_answer_that_cannot_be_read_fails_all_that_wait_on_the_stream() -> None:
    async def handler(_: Any, context: Any) -> None:
        number = (await read_call(context)).number
        await read_call(context)
        await context.write(worker_pb2.DispatchResponse(number=number, response=b"\xff"))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            for error in await asyncio.gather(start(made), start(made), return_exceptions=True):
                assert isinstance(error, RlhfError)
                assert "Synchronize: the answer cannot be read" in str(error)

    asyncio.run(asyncio.wait_for(main(), SOON_S))
