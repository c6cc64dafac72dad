"""gRPC client of one rank: makes calls to the methods of the contract over one channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from client.outage import RECONNECT_OPTIONS, RETRY_S, Outage, is_break
from client.stream import CallStream, unanswered, unreadable
from rlhf.access import Access
from rlhf.channels import open_aio_channel
from rlhf.contract import CHANNEL_OPTIONS, PLAIN_OPTIONS, SERVICES, Method
from rlhf.errors import DeadlineExceeded, RlhfError, ServiceLost, from_rpc_error
from rlhf.v1 import transfer_pb2


class RankClient:
    """gRPC client of one rank of a service, with a channel of its own. Messages of errors name service, rank, address
    and method.

    Args:
        service: Name of the service in the config.
        rank: Rank within the service, from 0.
        address: host:port of the rank.
        is_ours: Whether the server is one of this package, which accepts keepalive pings.
        shares_connection: Whether clients of the same address may share one TCP connection.
        access: Highest class of the methods that are called: the rank gets a token for them. Default: CALL.
        session: Name of the session, for a rank that serves WorkerService.Dispatch: calls of the role's methods are
            sent over one stream, which also keeps the session alive on the rank. Empty: every call is unary.
    """

    def __init__(
        self,
        service: str,
        rank: int,
        address: str,
        *,
        is_ours: bool = False,
        shares_connection: bool = True,
        access: Access = Access.CALL,
        session: str = "",
    ) -> None:
        self.service = service
        self.rank = rank
        self.address = address
        options = [*(CHANNEL_OPTIONS if is_ours else PLAIN_OPTIONS), *RECONNECT_OPTIONS]
        if not shares_connection:
            options.append(("grpc.use_local_subchannel_pool", 1))
        self._channel = open_aio_channel(address, options, access)
        self._callables: dict[str, Any] = {}
        self._session = session
        self._stream: CallStream | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return f"{self.service} rank {self.rank} ({self.address})"

    def start(self, method: Method, request: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Starts a call over the session's stream, or as a unary call with `reach` where there is no session or the
        method has no transfer protocol. Returns the future of its response, which raises the errors of `call`.
        Cancelling the future drops the response; over the stream, the rank still executes the call.

        Args:
            request: The request message, or its serialized bytes.
            timeout_s: Timeout of the call, in seconds.

        Raises:
            ValueError: The request cannot be serialized.
        """
        if not self._session or method.spec is None:
            return asyncio.ensure_future(self.reach(method, request, timeout_s))
        if self._stream is None:
            self._stream = CallStream(
                self.service, str(self), self._callable(WORKER["Dispatch"]), self._session
            )
        return self._stream.start(method, _serialized(request), timeout_s)

    async def reach(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Makes an idempotent unary call and returns the response. Retries it where the connection breaks, until the
        rank counts as lost (see `Outage`) or `timeout_s` seconds have passed. Raises the errors of `call`."""
        loop = asyncio.get_running_loop()
        due, outage = loop.time() + timeout_s, None
        while True:
            try:
                return await self.call(method, request, due - loop.time())
            except RlhfError as error:
                cause, now = error.__cause__, loop.time()
                if not isinstance(cause, grpc.RpcError) or not is_break(cause):
                    raise
                outage = outage or Outage(cause, now)
                outage.note(cause, now)
                if outage.is_lasting(now) or now + RETRY_S >= due:
                    raise
            await asyncio.sleep(RETRY_S)

    async def put(self, request: transfer_pb2.PutRequest, timeout_s: float) -> transfer_pb2.PutResponse:
        """Stores rows in the rank's arena with the Put RPC, retried as by `reach`, and returns the response. Raises
        the errors of `call`."""
        return await self.reach(PUT, request, timeout_s)

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Makes one unary call, without retries, and returns the response.

        Raises:
            RlhfError: The error that the rank reported; ServiceLost where it cannot be reached or the client is
                closed; DeadlineExceeded where it does not respond within `timeout_s` seconds.
        """
        try:
            answer = await self._callable(method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._explain(error, method, timeout_s) from error
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # gRPC cancels the calls of a channel that is closed, and refuses further ones.
            if not self._is_closed or _is_cancelled():
                raise
            lost = ServiceLost(f"{self} {method.name}: the connection was closed")
            raise lost.of_call(self.service) from None
        return self._parse(answer, method)

    async def stream(self, method: Method, request: Any) -> AsyncIterator[Any]:
        """Makes a server-streaming call, without a timeout, and yields its responses until the server ends the stream
        or the caller stops iterating. Raises an RlhfError where the call fails."""
        try:
            async for answer in self._callable(method)(request):
                yield self._parse(answer, method)
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"{self} {method.name}").of_call(self.service) from error

    async def close(self) -> None:
        """Closes the stream of calls and the channel. Pending calls and further unary ones fail with ServiceLost."""
        self._is_closed = True
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close()

    def _parse(self, answer: bytes, method: Method) -> Any:
        """Parses the response of a unary call, or one of a server-streaming call."""
        try:
            return method.response.FromString(answer)  # type: ignore[attr-defined]
        except DecodeError as error:
            raise unreadable(error, f"{self} {method.name}").of_call(self.service) from error

    def _explain(self, error: grpc.RpcError, method: Method, timeout_s: float) -> RlhfError:
        explained = from_rpc_error(error, f"{self} {method.name}")
        if isinstance(explained, DeadlineExceeded) and not explained.remote_traceback:
            # gRPC's own deadline, without an answer of the rank.
            explained = unanswered(str(self), method, timeout_s)
        return explained.of_call(self.service)

    def _callable(self, method: Method) -> Any:
        if method.path not in self._callables:
            kind = self._channel.unary_stream if method.streams else self._channel.unary_unary
            if method.takes_stream:
                kind = self._channel.stream_stream
            # Answers are parsed here and in `CallStream`: gRPC logs what it cannot parse, and goes on with None.
            self._callables[method.path] = kind(
                method.path, request_serializer=_serialized, response_deserializer=None
            )
        return self._callables[method.path]


def _is_cancelled() -> bool:
    """Whether the running task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _serialized(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


WORKER = SERVICES["worker"]
PUT = SERVICES["transfer"]["Put"]
