"""One rank as the controller sees it: a channel, and the methods of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from rlhf.contract import CHANNEL_OPTIONS, PLAIN_OPTIONS, SERVICES, Method
from rlhf.errors import DeadlineExceeded, RlhfError, from_rpc_error


class RankClient:
    """A channel to one rank. Errors name service, rank, address and method.

    Args:
        service: Name of the service in the config.
        rank: Rank within it.
        address: host:port.
        is_ours: Whether a server of this package answers there, which expects pings.
    """

    def __init__(self, service: str, rank: int, address: str, *, is_ours: bool = False) -> None:
        self.service = service
        self.rank = rank
        self.address = address
        self._channel = grpc.aio.insecure_channel(
            address, options=CHANNEL_OPTIONS if is_ours else PLAIN_OPTIONS
        )
        self._callables: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.service} rank {self.rank} ({self.address})"

    async def call(
        self, method: Method, request: Any, timeout_s: float, *, wait_for_ready: bool = False
    ) -> Any:
        """One unary call.

        Raises:
            RlhfError: As the service says, or ServiceLost, DeadlineExceeded.
        """
        try:
            return await self._callable(method)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
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
        await self._channel.close()

    def _explain(self, error: grpc.RpcError, method: Method, timeout_s: float) -> RlhfError:
        explained = from_rpc_error(error, f"{self} {method.name}")
        if isinstance(explained, DeadlineExceeded) and not explained.remote_traceback:
            # The rank has said nothing; this is gRPC's own clock.
            return DeadlineExceeded(f"{self} {method.name}: no answer within {timeout_s:g} s")
        return explained

    def _callable(self, method: Method) -> Any:
        if method.path not in self._callables:
            kind = self._channel.unary_stream if method.streams else self._channel.unary_unary
            self._callables[method.path] = kind(
                method.path,
                request_serializer=method.request.SerializeToString,  # type: ignore[attr-defined]
                response_deserializer=method.response.FromString,  # type: ignore[attr-defined]
            )
        return self._callables[method.path]


WORKER = SERVICES["worker"]
