"""Checks the tokens of calls to a server: one interceptor for all of its methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from rlhf.access import LIBRARY_METHODS, Access
from rlhf.contract import Method
from rlhf.errors import NotAllowed, NotAuthenticated, RlhfError
from rlhf.security import Security

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
                "this token is none of the service's"
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
        """Returns the method's handler, or one that ends the call with UNAUTHENTICATED or PERMISSION_DENIED."""
        details: Any = handler_call_details
        try:
            needed = self._classes.get(details.method, Access.ADMINISTER)
            _check(self._granted(details.invocation_metadata), needed, details.method)
        except (NotAuthenticated, NotAllowed) as error:
            return _refusal(error)
        return await continuation(handler_call_details)


def _check(granted: Access, needed: Access, path: str) -> None:
    if granted < needed:
        raise NotAllowed(f"{path} needs a token to {needed.word}, and this one is to {granted.word}")


def _refusal(error: RlhfError) -> grpc.RpcMethodHandler:
    """Returns a handler that reads nothing and ends a call, of any kind, with the status of an error."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(error.code, str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
