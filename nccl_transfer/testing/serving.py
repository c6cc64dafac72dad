"""Serves the RPCs of the data plane without the rest of a service, for checks and tests. The services of the cluster
add the same handlers to their servers and convert errors themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from nccl_transfer.transports.base import Handler
from rlhf.contract import SERVICES, Method
from rlhf.errors import STATUS_KEY, RlhfError, to_status

TRANSFER = SERVICES["transfer"]


def add_handlers(
    server: grpc.aio.Server,
    handlers: Mapping[str, Handler],
    services: Iterable[Mapping[str, Method]] = (TRANSFER,),
) -> None:
    """Adds handlers to a server.

    Args:
        server: The server.
        handlers: Async handlers, functions of (request, context), by path of the RPC. An RlhfError that they raise
            becomes the gRPC status of the call, which has its class in its details.
        services: Methods, by name, of each service to serve; those without a handler are left out. Default:
            TransferService.
    """
    for methods in services:
        table = {}
        for method in methods.values():
            if method.path not in handlers:
                continue
            make, wrap = grpc.unary_unary_rpc_method_handler, _answered
            if method.streams:
                make, wrap = grpc.unary_stream_rpc_method_handler, _streamed
            table[method.name] = make(
                wrap(handlers[method.path]),
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
