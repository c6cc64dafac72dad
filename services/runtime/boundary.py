"""The boundary between methods of a rank and gRPC: requests are parsed, and errors become statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import status_pb2

from rlhf.contract import Method
from rlhf.errors import (
    STATUS_KEY,
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    Refused,
    RewardFailed,
    TooManyCalls,
    drop_frames,
    full_traceback,
    shortened,
    to_status,
)
from services.runtime.deadlines import time_to_answer
from services.runtime.sessions import MAX_NAME
from services.runtime.worker import Worker

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a call whose client set none."""

NOT_OF_THIS_RANK = (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    Refused,
    RewardFailed,
    TooManyCalls,
)
"""Errors of a caller or a peer, whose text alone goes to the log of this rank, without a traceback."""

Handler = Callable[[Any, Any], Any]
"""Answers a request, given with gRPC's context: by a coroutine, or an asynchronous iterator of responses."""


class RpcBoundary:
    """Wraps the handlers of one rank.

    Args:
        service: Name of the service in the config.
        stop: Set when the rank begins to shut down; failures after that are not logged.
    """

    def __init__(self, worker: Worker, service: str, stop: asyncio.Event) -> None:
        rank = str(worker.ranks.rank)
        self._where = {"service": service, "role": worker.role, "rank": rank}
        self._stop = stop

    def rpc_handler(self, method: Method, handler: Handler) -> grpc.RpcMethodHandler:
        """gRPC's handler of a method."""
        if method.takes_stream:
            make, function = grpc.stream_stream_rpc_method_handler, self._unary(method, handler)
        elif method.streams:
            make, function = grpc.unary_stream_rpc_method_handler, self._stream(method, handler)
        else:
            make, function = grpc.unary_unary_rpc_method_handler, self._unary(method, handler)
        return make(
            function,
            request_deserializer=None,  # parsed here, so that a request that is none is an error like any other
            response_serializer=method.response.SerializeToString,  # type: ignore[attr-defined]
        )

    def status_of(self, error: Exception, method: str, call_id: str) -> status_pb2.Status:
        """The status of a failed call, which is logged."""
        if not self._stop.is_set():
            _log(error, method, call_id)
        return to_status(error, {**self._where, "method": method, "call_id": call_id})

    def _unary(self, method: Method, handler: Handler) -> Handler:
        async def answer(request: Any, context: Any) -> Any:
            try:
                request = request if method.takes_stream else method.parse(request)
                return await handler(request, context)
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await self._fail(error, method, request, context)

        return answer

    def _stream(self, method: Method, handler: Handler) -> Handler:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                request = method.parse(request)
                async for response in handler(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await self._fail(error, method, request, context)

        return answer

    async def _fail(self, error: Exception, method: Method, request: Any, context: Any) -> None:
        call = getattr(request, "call", None)
        call_id = call.call_id[:MAX_NAME] if call is not None else ""
        status = self.status_of(error, method.name, call_id)
        # The context keeps what `abort` raises, and so this error: its frames would keep the rows of the call.
        drop_frames(error)
        context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        await context.abort(code, status.message)


def timeout_s(context: Any) -> float:
    """Time in seconds to answer a call in, by its gRPC context."""
    remaining = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining is None else time_to_answer(remaining)


def _log(error: Exception, method: str, call_id: str) -> None:
    if isinstance(error, NOT_OF_THIS_RANK) and error.__cause__ is None:
        logging.info("%s %s: %s: %s", method, call_id, type(error).__name__, shortened(str(error)))
    else:
        logging.error("%s %s failed:\n%s", method, call_id, full_traceback(error))
