"""Serves TransferService without the rest of a service, for checks and tests. The services of the cluster add the
same handlers to their servers and convert errors themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from rlhf.contract import SERVICES
from rlhf.errors import STATUS_KEY, RlhfError, to_status

Handler = Callable[[Any, Any], Any]


def add_transfer_service(server: grpc.aio.Server, handlers: Mapping[str, Handler]) -> None:
    """Adds async handlers of TransferService, functions of (request, context) by method name such as "Fetch", to a
    server. An RlhfError that they raise becomes the gRPC status of the call, which has its class in its details."""
    methods, table = SERVICES["transfer"], {}
    for name, handler in handlers.items():
        method = methods[name]
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        table[name] = make(
            _streamed(handler) if method.streams else _answered(handler),
            request_deserializer=method.request.FromString,  # type: ignore[attr-defined]
            response_serializer=method.response.SerializeToString,  # type: ignore[attr-defined]
        )
    service = next(iter(methods.values())).service
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, table),))


def _answered(handler: Handler) -> Handler:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await handler(request, context)
        except RlhfError as error:
            await _fail(error, context)

    return answer


def _streamed(handler: Handler) -> Handler:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for message in handler(request, context):
                yield message
        except RlhfError as error:
            await _fail(error, context)

    return stream


async def _fail(error: RlhfError, context: Any) -> None:
    details = to_status(error, {}).SerializeToString()
    await context.abort(error.code, str(error), trailing_metadata=((STATUS_KEY, details),))
