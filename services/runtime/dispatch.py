"""Server side of WorkerService.Dispatch, a stream of many calls: each is queued when it arrives and answered when it
ends, so answers may come in a different order than requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import grpc.aio
from google.rpc import status_pb2

from rlhf.contract import SERVICES, Method
from rlhf.errors import InvalidRequest, UnknownCall
from rlhf.guard import Guard
from rlhf.v1 import worker_pb2
from services.runtime.deadlines import time_to_answer
from services.runtime.execution import CallQueue
from services.runtime.sessions import MAX_NAME, check_name
from services.runtime.worker import Registration

DISPATCH = SERVICES["worker"]["Dispatch"]

MOST_ANSWERS = 1 << 13
"""Most calls of a stream that wait for their end or for their answer to be written; at this number no further message
of the stream is read until one is answered."""

StatusOf = Callable[[Exception, str, str], status_pb2.Status]
"""Function that returns the gRPC status of an error, given the error, the name of the method and the id of the call."""


class DispatchStream:
    """Server side of one stream of WorkerService.Dispatch.

    Args:
        queue: Runs the calls.
        methods: The methods that may be called, by full gRPC path, such as "/rlhf.v1.ActorService/UpdateActor".
        status_of: Returns the status of a call that failed.
        guard: Decides whether the stream's client may make a call.
        context: The stream's gRPC context.
    """

    def __init__(
        self,
        queue: CallQueue,
        methods: Mapping[str, tuple[Method, Registration]],
        status_of: StatusOf,
        guard: Guard,
        context: grpc.aio.ServicerContext,
    ) -> None:
        self._queue = queue
        self._methods = methods
        self._status_of = status_of
        self._guard = guard
        self._granted = guard.granted(context)
        self._context = context
        self._writing = asyncio.Lock()
        self._answering: set[asyncio.Task[None]] = set()
        self._sessions: set[str] = set()

    async def serve(self) -> None:
        """Reads and answers calls until the caller has closed the stream and every call has been answered, or the
        connection is lost; calls in the queue then go on. Raises InvalidRequest for a message that cannot be parsed,
        or whose session has a name that is too long or differs from the stream's."""
        try:
            await self._context.send_initial_metadata(())
            while isinstance(message := await self._context.read(), bytes):
                await self._take(DISPATCH.parse(message))
            await asyncio.gather(*self._answering)
        finally:
            for answer in self._answering:
                answer.cancel()
            for session in self._sessions:
                self._queue.sessions.closed_stream(session)

    async def _take(self, message: worker_pb2.DispatchRequest) -> None:
        """Handles one message of the stream: notes the session that it names, and queues the call that it has, if
        any. A response that is there already is written before this returns, unless another one is being written;
        every other response is written by a task.

        Raises:
            InvalidRequest: The message names a different session than an earlier one of the stream, or its name is too
                long.
        """
        if message.session and message.session not in self._sessions:
            check_name("session", message.session)
            if self._sessions:
                raise InvalidRequest("Dispatch: a stream is of one session, and this one names two")
            self._sessions.add(message.session)
            self._queue.sessions.opened_stream(message.session)
        if not message.method:
            return
        response, call_id = self._start(message)
        if response.done() and not self._writing.locked():
            await self._answer(message, response, call_id)
        else:
            answer = asyncio.create_task(self._answer(message, response, call_id))
            self._answering.add(answer)
            answer.add_done_callback(self._answering.discard)
            if len(self._answering) >= MOST_ANSWERS:
                await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)

    def _start(self, message: worker_pb2.DispatchRequest) -> tuple[asyncio.Future[Any], str]:
        """Queues a call, or joins the known one with its id; returns a future of its response or error, and the
        call's id ("" if the request has none). Raises nothing: a call that is refused gives a future with the
        error."""
        call_id = ""
        try:
            if message.method not in self._methods:
                raise InvalidRequest(
                    f"Dispatch has no method {message.method[:MAX_NAME]!r}; it has {sorted(self._methods)}"
                )
            if not 0 < message.timeout_s < math.inf:
                raise InvalidRequest(
                    f"{message.method}: timeout_s is {message.timeout_s:g}; it must be above 0 and finite"
                )
            method, registration = self._methods[message.method]
            request = method.parse(message.request)
            self._guard.check(self._granted, method, request)
            check_name("call.call_id", request.call.call_id)
            call_id = request.call.call_id
            if message.only_known and not self._queue.knows(call_id):
                raise UnknownCall(f"{method.name}: there is no call {call_id!r}")
            return self._queue.start(
                method, registration, request, time_to_answer(message.timeout_s)
            ), call_id
        except Exception as error:  # noqa: BLE001 - told to the caller
            refused = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused, call_id

    async def _answer(
        self, message: worker_pb2.DispatchRequest, response: asyncio.Future[Any], call_id: str
    ) -> None:
        """Waits for a call as `_ended` does, and writes its response or its error to the stream; if a request with
        `only_known` times out, DeadlineExceeded, and the call goes on."""
        answer = worker_pb2.DispatchResponse(number=message.number)
        ended: Any = None
        try:
            ended = await self._ended(message, response, call_id)
        except Exception as error:  # noqa: BLE001 - told to the caller
            method = message.method.rpartition("/")[2]
            answer.status = self._status_of(error, method, call_id).SerializeToString()
        async with self._writing:
            # Not before its turn: a client that does not read would make each of its requests a copy.
            if ended is not None:
                answer.response = ended.SerializeToString()
            await self._context.write(answer)

    async def _ended(
        self, message: worker_pb2.DispatchRequest, response: asyncio.Future[Any], call_id: str
    ) -> Any:
        """Waits for a call and returns its response or raises its error. Raises DeadlineExceeded if the request sets
        `only_known` and the call has not ended after the request's `timeout_s`."""
        if response.done():
            return response.result()
        if message.only_known:
            return await self._queue.outcome(call_id, response, time_to_answer(message.timeout_s))
        return await self._queue.wait(call_id, response, hold=bool(self._sessions))
