"""Wraps the handlers of a rank for gRPC: parses requests, and turns errors into gRPC statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.rpc import status_pb2

from nccl_transfer.transports.base import Handler
from rlhf.contract import Method
from rlhf.errors import (
    STATUS_KEY,
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    PeerFailed,
    Refused,
    RewardFailed,
    TooManyCalls,
    drop_frames,
    full_traceback,
    one_line,
    printable,
    to_status,
)
from services.runtime.deadlines import time_to_answer
from services.runtime.sessions import MAX_NAME
from services.runtime.worker import Worker

DEFAULT_TIMEOUT_S = 600.0
"""Seconds that a call may take if its client has set no deadline."""

MOST_LOGGED = 1 << 16
"""Most characters of a traceback in the log, its last ones: the texts of errors may repeat those of a request."""

NOT_OF_THIS_RANK = (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    PeerFailed,
    Refused,
    RewardFailed,
    TooManyCalls,
)
"""Errors that a caller or another rank has caused; logged on this rank as one line, without a traceback."""


class RpcBoundary:
    """Wraps the handlers of one rank for gRPC.

    Args:
        worker: Worker of the rank; its service, role and rank are part of each error status.
        stop: Event that is set when the rank begins to shut down; later failures are not logged.
    """

    def __init__(self, worker: Worker, stop: asyncio.Event) -> None:
        rank = str(worker.ranks.rank)
        self._where = {"service": worker.service, "role": worker.role, "rank": rank}
        self._stop = stop

    def rpc_handler(self, method: Method, handler: Handler) -> grpc.RpcMethodHandler:
        """Returns a handler as gRPC's handler of a method, for unary or streaming calls as the method declares.
        Requests are parsed before the handler is called; its errors end the RPC with a status (`status_of`)."""
        if method.takes_stream:
            make, function = grpc.stream_stream_rpc_method_handler, self._unary(method, handler)
        elif method.streams:
            make, function = grpc.unary_stream_rpc_method_handler, self._stream(method, handler)
        else:
            make, function = grpc.unary_unary_rpc_method_handler, self._unary(method, handler)
        return make(
            function,
            request_deserializer=None,  # parsed here, so that an invalid message is reported like any other error
            response_serializer=method.response.SerializeToString,  # type: ignore[attr-defined]
        )

    def status_of(self, error: Exception, method: str, call_id: str) -> status_pb2.Status:
        """Returns the gRPC status of a failed call, and logs the failure unless the rank is shutting down.

        Args:
            error: The error of the call.
            method: Name of the method.
            call_id: Id of the call; "" for none.
        """
        if not self._stop.is_set():
            _log(error, method, call_id)
        return to_status(error, {**self._where, "method": method, "call_id": call_id})

    def _unary(self, method: Method, handler: Handler) -> Handler:
        """Returns gRPC's handler of a method with one response, or of Dispatch, whose handler reads and writes by its
        context."""

        async def answer(request: Any, context: Any) -> Any:
            try:
                request = request if method.takes_stream else method.parse(request)
                return await handler(request, context)
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await self._fail(error, method, request, context)

        return answer

    def _stream(self, method: Method, handler: Handler) -> Handler:
        """Returns gRPC's handler of a method with one request and a stream of responses."""

        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                request = method.parse(request)
                async for response in handler(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await self._fail(error, method, request, context)

        return answer

    async def _fail(self, error: Exception, method: Method, request: Any, context: Any) -> None:
        """Ends an RPC with the status of an error, which is also in the trailing metadata; always raises, as gRPC's
        `abort`."""
        call = getattr(request, "call", None)
        call_id = call.call_id[:MAX_NAME] if call is not None else ""
        # The context keeps what `abort` raises, and so this error: its frames would keep the rows of the call. Dropped
        # first, since this formats the traceback once for all that is told and logged of it.
        drop_frames(error)
        status = self.status_of(error, method.name, call_id)
        context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        await context.abort(code, status.message)


def timeout_s(context: Any) -> float:
    """Returns the seconds that a call may take, from the deadline in its gRPC context; DEFAULT_TIMEOUT_S if it has
    none."""
    remaining = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining is None else time_to_answer(remaining)


def _log(error: Exception, method: str, call_id: str) -> None:
    """Logs the error of a call: one line for an error of NOT_OF_THIS_RANK without a cause, otherwise the
    traceback."""
    call_id = one_line(call_id)
    if isinstance(error, NOT_OF_THIS_RANK) and error.__cause__ is None:
        logging.info("%s %s: %s: %s", method, call_id, type(error).__name__, one_line(str(error)))
    else:
        logging.error("%s %s failed:\n%s", method, call_id, printable(full_traceback(error)[-MOST_LOGGED:]))
