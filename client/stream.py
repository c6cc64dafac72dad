"""Calls to one rank over the bidirectional stream WorkerService.Dispatch. Calls outlive a broken connection: they are
sent again over the next one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from client.outage import RETRY_S, Outage, is_break, is_silence
from rlhf.contract import Method
from rlhf.errors import DeadlineExceeded, RlhfError, ServiceLost, UnknownCall, from_rpc_error, from_status
from rlhf.v1 import worker_pb2

REOPEN_S = 1.0
"""Pause, in seconds, before a broken stream is reopened while no call is under way: far less than the time after
which the rank ends the session."""
OUTCOME_S = 6.0
"""Time, in seconds, to wait for the outcome of a call past its deadline, since an update that was nearly done may
have been applied."""
MOST_STREAMS = 8
"""Number of streams that a call may be sent over before it counts as the cause of their breaking, and fails."""
CLOSE_S = 1.0
"""Longest time, in seconds, that `CallStream.close` waits for outgoing messages to be written."""
_WRITE_ERRORS = (grpc.RpcError, asyncio.InvalidStateError)
"""Exceptions that gRPC raises where a message is written to a broken or closed stream."""

Why = Callable[[str], RlhfError]
"""Function that makes an exception; it takes the place that its message names: service, rank, address and method."""


@dataclass(slots=True)
class _Call:
    """A call without a response so far.

    Attributes:
        answer: Future of the response.
        due: Deadline of the response, in the event loop's time.
        streams: Number of streams that the call was sent over.
        is_late: Whether the call is past its deadline, so that the rank is only asked for its outcome.
    """

    method: Method
    request: bytes
    answer: asyncio.Future[Any]
    timeout_s: float
    due: float
    streams: int = 0
    is_late: bool = False


class CallStream:
    """Sends calls to one rank over one gRPC stream at a time. Use it from one event loop only.

    A broken stream is reopened, also while no call is under way, since it keeps the session alive on the rank. Calls
    that were under way are then sent again with the same ids: the rank returns the result that it has, or continues
    the call. Where the rank cannot be reached for seconds (see `Outage`), all calls fail.

    Args:
        service: Name of the service in the config.
        who: Service, rank and address, for messages of errors.
        open_stream: Function that starts the gRPC call of a stream, whose messages are read as bytes, and returns it.
        session: Name of the session, the first message on every stream.
    """

    def __init__(self, service: str, who: str, open_stream: Callable[[], Any], session: str) -> None:
        self._service, self._who = service, who
        self._open_stream = open_stream
        self._session = session
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._stream: Any = None
        self._outgoing: deque[worker_pb2.DispatchRequest] = deque()
        self._more: asyncio.Future[None] | None = None
        self._is_closing = False
        self._outage: Outage | None = None
        self._hopeless: asyncio.TimerHandle | None = None
        self._wanted = asyncio.Event()
        self._begin()
        self._keeper = asyncio.create_task(self._keep())

    def start(self, method: Method, request: bytes, timeout_s: float) -> asyncio.Future[Any]:
        """Starts a call and returns the future of its response. The future raises an RlhfError: that of the rank,
        DeadlineExceeded where the rank did not respond, or ServiceLost where it counts as lost.

        Args:
            method: A method that the rank serves over Dispatch.
            request: The serialized request.
            timeout_s: Timeout of the call, in seconds.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        call = _Call(method, request, loop.create_future(), timeout_s, loop.time() + timeout_s)
        self._calls[number] = call
        self._wanted.set()
        self._send(number, call)
        if call.due < self._alarm_at:
            self._set_alarm(call.due)
        return call.answer

    async def close(self) -> None:
        """Closes the stream after its queued messages are written, at most `CLOSE_S` later. Calls without a response
        fail with ServiceLost, or with DeadlineExceeded where they are past their deadline."""
        with contextlib.suppress(TimeoutError, *_WRITE_ERRORS):
            async with asyncio.timeout(CLOSE_S):
                self._is_closing = True
                self._wake_writer()
                await asyncio.wait([self._writer])
                if self._stream is not None:
                    await self._stream.done_writing()
        self._keeper.cancel()
        self._writer.cancel()
        self._quiet()
        self._end_outage()
        self._fail_all(_closed)

    async def _keep(self) -> None:
        """Reads the stream until it breaks, then opens the next one, until the task is cancelled."""
        while True:
            error = await self._read()
            self._stream = None
            self._writer.cancel()
            self._note(error)
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                pause_s = RETRY_S if self._calls else REOPEN_S
                await asyncio.wait_for(self._wanted.wait(), pause_s)
            self._begin()

    def _begin(self) -> None:
        """Opens a stream and queues the session's name and all calls without a response on it."""
        self._stream = self._open_stream()
        self._outgoing = deque([worker_pb2.DispatchRequest(session=self._session)])
        self._writer = asyncio.create_task(self._write(self._stream, self._outgoing))
        for number, call in list(self._calls.items()):
            self._send(number, call)

    async def _read(self) -> grpc.RpcError | DecodeError | None:
        """Reads responses and sets them on the calls' futures until the stream ends. Returns the error that ended it,
        or None."""
        stream = self._stream
        try:
            await stream.initial_metadata()
            if not stream.done():
                self._end_outage()
                for call in self._calls.values():
                    call.streams += 1
            while isinstance(message := await stream.read(), bytes):
                self._take(worker_pb2.DispatchResponse.FromString(message))
        except grpc.RpcError as error:
            return error
        except DecodeError as error:
            stream.cancel()
            return error
        return None

    def _note(self, error: grpc.RpcError | DecodeError | None) -> None:
        """Handles the end of a stream. Fails all calls where the rank reported an error or has been unreachable for
        too long, and calls that were sent `MOST_STREAMS` times; the others are sent again over the next stream."""
        if isinstance(error, DecodeError):
            return self._fail_all(partial(unreadable, error))
        if isinstance(error, grpc.RpcError) and not is_break(error):
            return self._fail_all(partial(_broken, error))
        now = asyncio.get_running_loop().time()
        if self._outage is None:
            self._outage = Outage(error, now)
            self._hopeless = asyncio.get_running_loop().call_at(self._outage.ends, self._give_up)
        self._outage.note(error, now)
        if self._outage.is_lasting(now):
            self._give_up()
        for number, call in list(self._calls.items()):
            if call.streams >= MOST_STREAMS:
                self._fail(number, self._why()(f"{self._who} {call.method.name}"))

    def _give_up(self) -> None:
        """Fails all calls, since the rank counts as lost."""
        self._fail_all(self._why())

    def _why(self) -> Why:
        """Returns the function that makes the error of a lost rank, from the gRPC error that the outage began
        with."""
        first = self._outage.first if self._outage else None
        return partial(_broken, first) if first else _closed

    def _end_outage(self) -> None:
        if self._hopeless is not None:
            self._hopeless.cancel()
        self._outage = self._hopeless = None

    def _send(self, number: int, call: _Call) -> None:
        """Queues a call on the current stream, for the first time or again. Of a call past its deadline, only the
        outcome is requested."""
        if self._stream is None:
            return  # it is sent when the next stream opens
        remaining_s = max(call.due - asyncio.get_running_loop().time(), 1e-3)
        self._outgoing.append(
            worker_pb2.DispatchRequest(
                number=number,
                method=call.method.path,
                request=call.request,
                timeout_s=remaining_s,
                only_known=call.is_late,
            )
        )
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _write(self, stream: Any, outgoing: deque[worker_pb2.DispatchRequest]) -> None:
        """Writes queued messages until the stream ends. One task writes for all calls, which costs less than a task
        for each."""
        # Where a write fails, the reader fails too and handles the error.
        loop = asyncio.get_running_loop()
        with contextlib.suppress(*_WRITE_ERRORS):
            while True:
                while outgoing:
                    await stream.write(outgoing.popleft())
                if self._is_closing:
                    return
                self._more = loop.create_future()
                await self._more

    def _take(self, message: worker_pb2.DispatchResponse) -> None:
        """Sets the result or the error of a response on its call's future; ignores one for an unknown number."""
        call = self._calls.get(message.number)
        if call is None:
            return
        if message.WhichOneof("result") == "status":
            status = status_pb2.Status.FromString(message.status)
            error = from_status(status, f"{self._who} {call.method.name}")
            if call.is_late and isinstance(error, UnknownCall):
                error = self._unanswered(call)  # the rank never received it
            return self._fail(message.number, error)
        response = call.method.response.FromString(message.response)  # type: ignore[attr-defined]
        del self._calls[message.number]
        if not call.answer.done():
            call.answer.set_result(response)

    def _fail(self, number: int, error: RlhfError) -> None:
        call = self._calls.pop(number)
        if not call.answer.done():
            call.answer.set_exception(error.of_call(self._service))

    def _fail_all(self, why: Why) -> None:
        """Fails all calls with errors that `why` makes, or with DeadlineExceeded where they are past their deadline."""
        for number, call in list(self._calls.items()):
            late = self._unanswered(call) if call.is_late else None
            self._fail(number, late or why(f"{self._who} {call.method.name}"))

    def _unanswered(self, call: _Call) -> DeadlineExceeded:
        return unanswered(self._who, call.method, call.timeout_s)

    def _set_alarm(self, due: float) -> None:
        """Sets the timer that all calls share to the time `due`. Few calls are late, and a timer for each would cost
        as much as a message."""
        self._quiet()
        self._alarm, self._alarm_at = asyncio.get_running_loop().call_at(due, self._expire), due

    def _quiet(self) -> None:
        """Cancels the timer that all calls share, if it is set."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, math.inf

    def _expire(self) -> None:
        """Runs when a deadline has passed: asks the rank once for the outcome of each call past its deadline, and
        fails those whose outcome did not arrive within `OUTCOME_S`."""
        self._quiet()
        # Timers count in milliseconds and may fire early by less than one.
        now = asyncio.get_running_loop().time()
        for number, call in [each for each in self._calls.items() if each[1].due <= now + 1e-3]:
            if call.is_late or call.answer.done():
                self._fail(number, self._unanswered(call))
                continue
            call.is_late, call.due = True, now + OUTCOME_S
            self._send(number, call)
        if self._calls:
            self._set_alarm(min(call.due for call in self._calls.values()))


def unanswered(who: str, method: Method, timeout_s: float) -> DeadlineExceeded:
    """Makes the error of a call that a rank did not respond to in time. `who` names service, rank and address."""
    return DeadlineExceeded(f"{who} {method.name}: no answer within {timeout_s:g} s")


def _closed(where: str) -> ServiceLost:
    return ServiceLost(f"{where}: the stream of calls was closed")


def _broken(error: grpc.RpcError, where: str) -> RlhfError:
    """Makes the error of calls on a broken stream: ServiceLost, or the error that the rank reported."""
    if is_silence(error):
        return ServiceLost(
            f"{where}: no answer, not even to pings: its process is stopped, or its host cut off"
        )
    explained = from_rpc_error(error, where)
    if is_break(error) and not isinstance(explained, ServiceLost):
        # gRPC's own texts, such as "Internal error from Core", do not say that a connection broke.
        said = str(explained).removeprefix(f"{where}: ")
        return ServiceLost(f"{where}: cannot be reached or died: {said}")
    return ServiceLost(str(explained)) if type(explained) is RlhfError else explained


def unreadable(error: DecodeError, where: str) -> RlhfError:
    """Makes the error of a call whose response is no message of its type, as of a server that is not ours."""
    return RlhfError(f"{where}: the answer cannot be read: {error}")
