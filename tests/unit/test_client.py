"""A rank's client whose stream of calls breaks or carries invalid messages, against a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from client import outage, stream
from client.rank import RankClient
from rlhf.contract import SERVICES
from rlhf.errors import STATUS_KEY, DeadlineExceeded, Refused, RlhfError, ServiceLost, UnknownCall, to_status
from rlhf.v1 import common_pb2, worker_pb2

DISPATCH = SERVICES["worker"]["Dispatch"]
SYNCHRONIZE = SERVICES["worker"]["Synchronize"]
SOON_S = 10.0
SERIALIZED = worker_pb2.DispatchResponse.SerializeToString

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]


@contextlib.asynccontextmanager
async def rank(handler: Handler, written: Callable[[Any], bytes] = SERIALIZED) -> AsyncIterator[RankClient]:
    """A client of a server whose Dispatch is the handler."""
    async with serving(handler, written) as address:
        made = RankClient("actor", 3, address, session="run")
        try:
            yield made
        finally:
            await made.close()


@contextlib.asynccontextmanager
async def serving(handler: Handler, written: Callable[[Any], bytes] = SERIALIZED) -> AsyncIterator[str]:
    """Address of a server whose Dispatch is the handler, and whose messages are serialized by `written`."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(handler, worker_pb2.DispatchRequest.FromString, written)
    table = {DISPATCH.name: method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DISPATCH.service, table),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def start(made: RankClient, call_id: str = "a", timeout_s: float = SOON_S) -> asyncio.Future[Any]:
    request = worker_pb2.SynchronizeRequest(call=common_pb2.Call(call_id=call_id))
    return made.start(SYNCHRONIZE, request, timeout_s)


def call_id_of(message: worker_pb2.DispatchRequest) -> str:
    return worker_pb2.SynchronizeRequest.FromString(message.request).call.call_id


def answer(number: int, version: int = 0) -> worker_pb2.DispatchResponse:
    response = worker_pb2.SynchronizeResponse(outcome=common_pb2.Outcome(policy_version=version))
    return worker_pb2.DispatchResponse(number=number, response=response.SerializeToString())


async def read_call(context: Any) -> worker_pb2.DispatchRequest:
    """The next message that is a call."""
    while not (message := await context.read()).method:
        assert message.session == "run"
    return message


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, SOON_S))


def test_a_stream_that_breaks_is_made_anew_also_while_no_call_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "REOPEN_S", 0.01)
    sessions: list[str] = []

    async def main() -> None:
        is_back = asyncio.Event()

        async def handler(_: Any, context: Any) -> None:
            sessions.append((await context.read()).session)
            if len(sessions) == 1:
                await context.write(answer((await read_call(context)).number))
            if len(sessions) < 3:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            is_back.set()
            await context.read()

        async with rank(handler) as made:
            await start(made)
            await is_back.wait()

    run(main())
    assert sessions == ["run"] * 3


def test_calls_under_way_when_a_stream_breaks_are_sent_again_by_their_ids_in_their_order() -> None:
    asked: list[list[str]] = []

    async def handler(_: Any, context: Any) -> None:
        messages = [await read_call(context) for _ in range(2)]
        asked.append([call_id_of(message) for message in messages])
        if len(asked) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        for version, message in enumerate(messages):
            await context.write(answer(message.number, version))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            answers = await asyncio.gather(start(made, "a"), start(made, "b"))
            assert [each.outcome.policy_version for each in answers] == [0, 1]

    run(main())
    assert asked == [["a", "b"], ["a", "b"]]


def test_a_rank_that_says_why_it_ends_a_stream_is_not_asked_again() -> None:
    streams = 0

    async def handler(_: Any, context: Any) -> None:
        nonlocal streams
        streams += 1
        for _ in range(2):
            await read_call(context)
        status = to_status(ServiceLost("the service is shutting down"), {})
        context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, status.message)

    async def main() -> None:
        async with rank(handler) as made:
            lost = await asyncio.gather(start(made, "a"), start(made, "b"), return_exceptions=True)
            assert [type(error) for error in lost] == [ServiceLost, ServiceLost]
            assert "actor rank 3" in str(lost[0])
            assert "the service is shutting down" in str(lost[0])
            assert streams == 1

    run(main())


def test_a_process_that_is_gone_is_told_within_a_second_or_two() -> None:
    async def handler(_: Any, context: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await read_call(context)
            is_asked.set()
            await asyncio.Event().wait()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as server:
            made = RankClient("actor", 3, await server.enter_async_context(serving(handler)), session="run")
            lost = start(made)
            await is_asked.wait()
            await server.aclose()
            began = time.monotonic()
            with pytest.raises(
                ServiceLost, match=r"actor rank 3 .* Synchronize: cannot be reached or died: "
            ):
                await lost
            with pytest.raises(ServiceLost, match="cannot be reached or died"):
                await start(made, "b")
            assert time.monotonic() - began < 2.0
            await made.close()

    is_asked = asyncio.Event()
    run(main())


def test_a_rank_that_is_out_of_reach_for_too_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "RECONNECT_S", 0.5)

    async def main() -> None:
        async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(silence, "127.0.0.1", 0)
        made = RankClient("actor", 3, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", session="run")
        with pytest.raises(ServiceLost, match=r"actor rank 3 .* cannot be reached or died: "):
            await start(made)
        await made.close()
        server.close()

    run(main())


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_a_stream_that_breaks_with_an_error_of_grpc_alone_is_that_of_a_lost_rank(
    code: grpc.StatusCode,
) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, nothing, nothing, "Internal error from Core")
    broken = stream._broken(error, "actor rank 3 (127.0.0.1:1) DescribeWeights")
    assert type(broken) is ServiceLost
    assert str(broken) == (
        "actor rank 3 (127.0.0.1:1) DescribeWeights: cannot be reached or died: Internal error from Core"
    )


def test_a_stream_that_ends_with_an_unknown_error_is_that_of_a_lost_rank() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, nothing, nothing, "Exception in the handler")
    broken = stream._broken(error, "actor rank 3 (127.0.0.1:1) UpdateActor")
    assert type(broken) is ServiceLost
    assert str(broken) == "actor rank 3 (127.0.0.1:1) UpdateActor: Exception in the handler"


def test_the_outcome_of_a_call_past_its_deadline_is_asked_for_once() -> None:
    """An update that was nearly done has committed: its controller is not to think that it failed."""
    asked: list[tuple[str, bool]] = []

    async def handler(_: Any, context: Any) -> None:
        for _ in range(2):
            message = await read_call(context)
            asked.append((call_id_of(message), message.only_known))
        await context.write(answer(message.number, 7))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            assert (await start(made, timeout_s=0.2)).outcome.policy_version == 7

    run(main())
    assert asked == [("a", False), ("a", True)]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_call_without_an_outcome_was_not_answered_in_time(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(stream, "OUTCOME_S", 0.2)

    async def handler(_: Any, context: Any) -> None:
        for _ in range(2):
            message = await read_call(context)
        if not is_known:
            status = to_status(UnknownCall("there is no call 'a'"), {}).SerializeToString()
            await context.write(worker_pb2.DispatchResponse(number=message.number, status=status))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            with pytest.raises(DeadlineExceeded, match=r"Synchronize: no answer within 0\.2 s"):
                await start(made, timeout_s=0.2)

    run(main())


def test_a_call_that_is_refused_after_its_deadline_says_so() -> None:
    """A run that was superseded then has not lost a service: it must not be restarted (`Restarts`)."""

    async def handler(_: Any, context: Any) -> None:
        for _ in range(2):
            message = await read_call(context)
        status = to_status(Refused("session 'run' was superseded"), {}).SerializeToString()
        await context.write(worker_pb2.DispatchResponse(number=message.number, status=status))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            with pytest.raises(Refused, match="Synchronize: session 'run' was superseded"):
                await start(made, timeout_s=0.2)

    run(main())


def test_a_call_that_breaks_every_stream_it_is_sent_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RETRY_S", 0.01)
    sends = 0

    async def handler(_: Any, context: Any) -> None:
        nonlocal sends
        await context.send_initial_metadata(())
        await read_call(context)
        sends += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    async def main() -> None:
        async with rank(handler) as made:
            with pytest.raises(ServiceLost, match="broken"):
                await start(made)
            assert stream.MOST_STREAMS <= sends <= 3 * stream.MOST_STREAMS

    run(main())


def test_an_answer_that_cannot_be_read_fails_all_that_wait_on_the_stream() -> None:
    async def handler(_: Any, context: Any) -> None:
        number = (await read_call(context)).number
        await read_call(context)
        await context.write(worker_pb2.DispatchResponse(number=number, response=b"\xff"))
        await context.read()

    async def main() -> None:
        async with rank(handler) as made:
            for error in await asyncio.gather(start(made), start(made, "b"), return_exceptions=True):
                assert isinstance(error, RlhfError)
                assert "Synchronize: the answer cannot be read" in str(error)

    run(main())


def test_a_message_of_the_stream_that_cannot_be_read_is_an_error_of_the_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC does not log it with a traceback, and the call is not taken for one whose connection broke."""

    async def handler(_: Any, context: Any) -> None:
        await read_call(context)
        await context.write(b"\xff")
        await context.read()

    async def main() -> None:
        async with rank(handler, lambda message: message) as made:
            with pytest.raises(RlhfError, match="Synchronize: the answer cannot be read") as raised:
                await start(made)
            assert raised.value.called == "actor"

    run(main())
    assert not caplog.records


def test_an_answer_of_a_unary_call_or_a_watch_that_cannot_be_read_is_an_error_of_the_rank() -> None:
    """As of a server at a wrong address, which is not ours."""
    describe, watch = SERVICES["worker"]["Describe"], SERVICES["worker"]["Watch"]

    async def main() -> None:
        server = grpc.aio.server()

        async def garbage(*_: Any) -> AsyncIterator[bytes]:
            yield b"\xff"

        async def one(*_: Any) -> bytes:
            return b"\xff"

        table = {
            describe.name: grpc.unary_unary_rpc_method_handler(one),
            watch.name: grpc.unary_stream_rpc_method_handler(garbage),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(describe.service, table),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        made = RankClient("reward", 0, f"127.0.0.1:{port}")
        try:
            with pytest.raises(
                RlhfError, match=r"^reward rank 0 \(\S+\) Describe: the answer cannot be read"
            ) as raised:
                await made.reach(describe, worker_pb2.DescribeRequest(), SOON_S)
            assert raised.value.called == "reward"
            with pytest.raises(RlhfError, match=r"^reward rank 0 \(\S+\) Watch: the answer cannot be read"):
                _ = [each async for each in made.stream(watch, worker_pb2.WatchRequest())]
        finally:
            await made.close()
            await server.stop(None)

    run(main())


@pytest.mark.parametrize("session", ["run", ""], ids=["stream", "unary"])
def test_the_error_of_a_call_has_the_name_of_the_service_that_was_called(session: str) -> None:
    """Not that of the service that reports it, which may be another, or have no name."""

    async def handler(_: Any, context: Any) -> None:
        status = to_status(Refused("not now"), {"service": "critic"}).SerializeToString()
        while not (message := await context.read()).method:
            pass
        await context.write(worker_pb2.DispatchResponse(number=message.number, status=status))
        await context.read()

    async def main() -> None:
        async with serving(handler) as address:
            made = RankClient("actor", 0, address, session=session)
            with pytest.raises(RlhfError) as raised:
                await start(made)
            assert raised.value.called == "actor"
            await made.close()
        made = RankClient("actor", 0, address, session=session)
        with pytest.raises(ServiceLost) as lost:
            await start(made)
        assert (lost.value.called, lost.value.service) == ("actor", "")
        await made.close()

    run(main())


def test_calls_of_a_client_that_is_closed_fail_as_those_of_a_lost_rank() -> None:
    """Those under way, those that are about to be sent again, and later ones; a task that is cancelled ends."""
    release, request = SERVICES["worker"]["Release"], worker_pb2.ReleaseRequest(session="run")

    async def main() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as silent:
            host, port = silent.sockets[0].getsockname()
            made = RankClient("reward", 0, f"{host}:{port}")
            calls = [asyncio.ensure_future(made.reach(release, request, SOON_S)) for _ in range(2)]
            await asyncio.sleep(0.1)
            calls[1].cancel()
            await made.close()
            with pytest.raises(asyncio.CancelledError):
                await calls[1]
            for call in (calls[0], made.reach(release, request, SOON_S)):
                with pytest.raises(
                    ServiceLost, match=r"^reward rank 0 \(\S+\) Release: the connection was closed$"
                ) as raised:
                    await call
                assert raised.value.called == "reward"

    run(main())
