"""Checks the tokens of calls to a server: one interceptor for all of its methods."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from rlhf.access import LIBRARY_METHODS, Access
from rlhf.contract import Method
from rlhf.errors import NotAllowed, NotAuthenticated, RlhfError, TooManyCalls
from rlhf.security import Security

MOST_READS = 1 << 10
"""Most RPCs, streams included, with a token to read that a server handles at a time. They leave most of the server's
RPCs (`channels.MOST_RPCS`) to other tokens."""

HEADER, SCHEME = "authorization", "Bearer "
Metadata = Any
"""Metadata of a call: an iterable of pairs of key and value."""


class Guard(grpc.aio.ServerInterceptor):
    """Lets through the calls whose token allows their method, and ends all others before a message of theirs is read.

    Args:
        security: Tokens of the server.
        classes: Class of each method that the server serves, by path, without those of gRPC's own libraries. A method
            that is missing needs ADMINISTER.
    """

    def __init__(self, security: Security, classes: Mapping[str, Access]) -> None:
        self._security = security
        self._classes = {**LIBRARY_METHODS, **classes}
        self._reads = 0

    def granted(self, context: grpc.aio.ServicerContext) -> Access:
        """Returns the class of methods that the client of a call may use, given the context of the call: ADMINISTER
        where the server asks for no tokens. Raises NotAuthenticated for a call that `intercept_service` refuses."""
        return self._granted(context.invocation_metadata()) if self._security.tokens else Access.ADMINISTER

    def _granted(self, metadata: Metadata) -> Access:
        """Returns the class that the token in a call's metadata allows; raises NotAuthenticated without a known
        token."""
        given = [value for key, value in metadata or () if key == HEADER]
        token = given[0].removeprefix(SCHEME) if len(given) == 1 and given[0].startswith(SCHEME) else ""
        granted = self._security.grant(token)
        if granted is None:
            raise NotAuthenticated(
                "this token is not one of the service's tokens"
                if token
                else f"a token is needed: metadata {HEADER!r} with the value '{SCHEME}TOKEN'"
            )
        return granted

    def check(self, granted: Access, method: Method, request: Any) -> None:
        """Checks that a client may make one call of a method of ranks, be it an RPC or a message of Dispatch.

        Args:
            granted: Class that the client's token allows.
            method: The method.
            request: The request message; one that takes over another run needs ADMINISTER.

        Raises:
            NotAllowed: It may not.
        """
        takes_over = method.spec is not None and request.call.take_over
        _check(granted, Access.ADMINISTER if takes_over else method.access, method.path)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, or one that ends the call with UNAUTHENTICATED, PERMISSION_DENIED or
        RESOURCE_EXHAUSTED."""
        details: Any = handler_call_details
        try:
            needed = self._classes.get(details.method, Access.ADMINISTER)
            granted = self._granted(details.invocation_metadata)
            _check(granted, needed, details.method)
            if granted == Access.READ:
                self._count_read()
        except (NotAuthenticated, NotAllowed, TooManyCalls) as error:
            return _refusal(error)
        return await continuation(handler_call_details)

    def _count_read(self) -> None:
        """Counts the RPC that the current task serves until the task ends, so also while its request has not come.
        Raises TooManyCalls where it would be more than MOST_READS."""
        if self._reads >= MOST_READS:
            raise TooManyCalls(f"{MOST_READS} RPCs with a token to read are open already")
        task = asyncio.current_task()
        assert task is not None, "gRPC serves each RPC in a task"
        self._reads += 1
        task.add_done_callback(self._end_read)

    def _end_read(self, task: asyncio.Task[Any]) -> None:
        self._reads -= 1


def _check(granted: Access, needed: Access, path: str) -> None:
    if granted < needed:
        raise NotAllowed(
            f"{path} requires a token of class {needed.word}; the given token is of class {granted.word}"
        )


def _refusal(error: RlhfError) -> grpc.RpcMethodHandler:
    """Returns a handler that ends a unary or streaming call with the status of an error, without reading requests."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(error.code, str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
