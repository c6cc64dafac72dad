"""One rank as the controller sees it: a channel, and the methods of the contract."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from rlhf.contract import CHANNEL_OPTIONS, PLAIN_OPTIONS, SERVICES, Method
from rlhf.errors import DeadlineExceeded, RlhfError, ServiceLost, from_rpc_error, from_status
from rlhf.v1 import worker_pb2

REOPEN_S = 1.0
"""Pause before a stream that broke is made anew: far below what a rank waits for it."""
CLOSE_S = 1.0
"""How long a rank that does not read may hold up the end of its stream of calls."""
_WRITE_ERRORS = (grpc.RpcError, asyncio.InvalidStateError)
"""What writing to a stream raises that has broken or ended."""


class RankClient:
    """A channel to one rank. Errors name service, rank, address and method.

    Args:
        service: Name of the service in the config.
        rank: Rank within it.
        address: host:port.
        is_ours: Whether a server of this package answers there, which expects pings.
        session: Where given, the rank serves WorkerService.Dispatch: calls that run on the group go over one stream,
            which is made anew whenever it breaks, and tells the rank that the session's controller is there.
    """

    def __init__(
        self, service: str, rank: int, address: str, *, is_ours: bool = False, session: str = ""
    ) -> None:
        self.service = service
        self.rank = rank
        self.address = address
        self._channel = grpc.aio.insecure_channel(
            address, options=CHANNEL_OPTIONS if is_ours else PLAIN_OPTIONS
        )
        self._callables: dict[str, Any] = {}
        self._session = session
        self._stream: DispatchStream | None = None
        self._is_closing = False

    def __str__(self) -> str:
        return f"{self.service} rank {self.rank} ({self.address})"

    def start(self, method: Method, request: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Begins a call, to be answered within `timeout_s` seconds; errors of its future are those of `call`.
        Cancelling the future forgets the answer, and does not stop what the rank does.

        Raises:
            ValueError: The request cannot be serialized.
        """
        if not self._session or method.spec is None:
            return asyncio.ensure_future(self.call(method, request, timeout_s))
        return self._open_stream().start(method, request, timeout_s)

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """One unary call.

        Raises:
            RlhfError: As the service says, or ServiceLost, DeadlineExceeded.
        """
        try:
            return await self._callable(method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._explain(error, method, timeout_s) from error

    async def stream(self, method: Method, request: Any) -> AsyncIterator[Any]:
        """The responses of a streaming call, until the service ends it or the caller stops asking."""
        try:
            async for response in self._callable(method)(request):
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"{self} {method.name}") from error

    async def close(self) -> None:
        self._is_closing = True
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close()

    def _open_stream(self) -> DispatchStream:
        """The stream of calls, a new one where there is none or it has ended."""
        if self._stream is None or self._stream.ended.done():
            self._stream = DispatchStream(str(self), self._callable(WORKER["Dispatch"])(), self._session)
            loop = asyncio.get_running_loop()
            self._stream.ended.add_done_callback(lambda _: loop.call_later(REOPEN_S, self._reopen_stream))
        return self._stream

    def _reopen_stream(self) -> None:
        """Also while no call is made, a rank is to know that its controller lives."""
        if not self._is_closing:
            self._open_stream()

    def _explain(self, error: grpc.RpcError, method: Method, timeout_s: float) -> RlhfError:
        explained = from_rpc_error(error, f"{self} {method.name}")
        if isinstance(explained, DeadlineExceeded) and not explained.remote_traceback:
            # The rank has said nothing; this is gRPC's own clock.
            return _unanswered(str(self), method, timeout_s)
        return explained

    def _callable(self, method: Method) -> Any:
        if method.path not in self._callables:
            kind = self._channel.unary_stream if method.streams else self._channel.unary_unary
            if method.takes_stream:
                kind = self._channel.stream_stream
            self._callables[method.path] = kind(
                method.path,
                request_serializer=method.request.SerializeToString,  # type: ignore[attr-defined]
                response_deserializer=method.response.FromString,  # type: ignore[attr-defined]
            )
        return self._callables[method.path]


@dataclass(slots=True)
class _Call:
    """A call whose answer has not come, and is due at this time of the event loop."""

    method: Method
    answer: asyncio.Future[Any]
    timeout_s: float
    due: float


class DispatchStream:
    """Calls to one rank over one stream of WorkerService.Dispatch. Used from the event loop.

    Args:
        who: Service, rank and address, for messages.
        stream: gRPC's call, just begun.
        session: Whose controller the stream tells of.

    Attributes:
        ended: Done once the stream takes no more calls: the rank is gone, or has ended it.
    """

    def __init__(self, who: str, stream: Any, session: str) -> None:
        self._who = who
        self._stream = stream
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._outgoing: deque[worker_pb2.DispatchRequest] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._send(worker_pb2.DispatchRequest(session=session))
        self.ended = asyncio.create_task(self._read())

    def start(self, method: Method, request: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Begins a call of a method that runs on a group. Errors as of `RankClient.start`."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        message = worker_pb2.DispatchRequest(
            number=number, method=method.path, request=request.SerializeToString(), timeout_s=timeout_s
        )
        call = self._calls[number] = _Call(method, loop.create_future(), timeout_s, loop.time() + timeout_s)
        self._send(message)
        if call.due < self._alarm_at:
            self._set_alarm(call.due)
        return call.answer

    async def close(self) -> None:
        """Tells the rank that no more calls come."""
        with contextlib.suppress(TimeoutError, *_WRITE_ERRORS):
            async with asyncio.timeout(CLOSE_S):
                if self._writer is not None:
                    await self._writer
                await self._stream.done_writing()
        self._quiet()

    def _send(self, message: worker_pb2.DispatchRequest) -> None:
        self._outgoing.append(message)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        # Where this fails, so does the reader, and it tells all who wait.
        with contextlib.suppress(*_WRITE_ERRORS):
            while self._outgoing:
                await self._stream.write(self._outgoing.popleft())
        self._writer = None

    async def _read(self) -> None:
        """Hands out answers until the stream ends; then every call that waits hears why."""
        why: Callable[[str], RlhfError] = _closed
        try:
            while isinstance(message := await self._stream.read(), worker_pb2.DispatchResponse):
                self._take(message)
        except grpc.RpcError as error:
            why = partial(_broken, error)
        except DecodeError as error:
            self._stream.cancel()
            why = partial(_unreadable, error)
        finally:
            self._quiet()
            for number, call in list(self._calls.items()):
                self._fail(number, why(f"{self._who} {call.method.name}"))

    def _take(self, message: worker_pb2.DispatchResponse) -> None:
        call = self._calls.get(message.number)
        if call is None:
            return
        if message.WhichOneof("result") == "status":
            status = status_pb2.Status.FromString(message.status)
            return self._fail(message.number, from_status(status, f"{self._who} {call.method.name}"))
        response = call.method.response.FromString(message.response)  # type: ignore[attr-defined]
        del self._calls[message.number]
        if not call.answer.done():
            call.answer.set_result(response)

    def _fail(self, number: int, error: RlhfError) -> None:
        call = self._calls.pop(number)
        if not call.answer.done():
            call.answer.set_exception(error)

    def _set_alarm(self, due: float) -> None:
        """One alarm for all calls: few are ever late, and a timer for each would cost as much as its message."""
        self._quiet()
        self._alarm, self._alarm_at = asyncio.get_running_loop().call_at(due, self._expire), due

    def _quiet(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, math.inf

    def _expire(self) -> None:
        self._quiet()
        # Timers count in milliseconds, and may be early by less than one.
        soon = asyncio.get_running_loop().time() + 1e-3
        for number, call in [(number, call) for number, call in self._calls.items() if call.due <= soon]:
            self._fail(number, _unanswered(self._who, call.method, call.timeout_s))
        if self._calls:
            self._set_alarm(min(call.due for call in self._calls.values()))


def _closed(where: str) -> ServiceLost:
    return ServiceLost(f"{where}: the stream of calls was closed")


def _broken(error: grpc.RpcError, where: str) -> RlhfError:
    """Why a stream broke. One that does so while it begins ends with an error of gRPC's own that names no cause."""
    explained = from_rpc_error(error, where)
    return ServiceLost(str(explained)) if type(explained) is RlhfError else explained


def _unreadable(error: DecodeError, where: str) -> RlhfError:
    return RlhfError(f"{where}: the answer cannot be read: {error}")


def _unanswered(who: str, method: Method, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{who} {method.name}: no answer within {timeout_s:g} s")


WORKER = SERVICES["worker"]
