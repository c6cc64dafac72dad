"""The service under test: its ranks, and one method called on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.wire_ranks import mesh_from_proto
from rlhf.channels import open_aio_channel
from rlhf.contract import CHANNEL_OPTIONS, PLAIN_OPTIONS, SERVICES, Method
from rlhf.errors import ConfigError, from_rpc_error
from rlhf.v1 import common_pb2, reward_pb2, worker_pb2

CONNECT_S = 10.0
"""How long a service may take to answer Describe."""
SETTLE_S = 2.0
"""How long Cancel and Release may take."""
OK = "OK"
ROW_ERROR = "ROW_ERROR"
"""A reward that answered, but not with a score for every row."""

_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_WORKER = SERVICES["worker"]


@dataclass(frozen=True)
class Reply:
    """How one call ended.

    Attributes:
        code: gRPC code, or ROW_ERROR.
        timings: What each rank said about where its time went; empty where it said nothing.
    """

    code: str
    timings: Sequence[common_pb2.Timing] = ()


class Target:
    """Channels to every rank of a service. A context manager.

    Args:
        address: host:port of rank 0.
        role: What should serve there.
        connections: Connections to each rank; calls take turns with them.

    Attributes:
        description: What Describe said; None for a server that does not serve it.
    """

    def __init__(self, address: str, role: str, connections: int) -> None:
        self.address = address
        self.role = role
        self.description: worker_pb2.DescribeResponse | None = None
        self._connections = connections
        self._channels: list[list[grpc.aio.Channel]] = []

    async def __aenter__(self) -> Target:
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._close()

    @property
    def num_ranks(self) -> int:
        return len(self._channels)

    @property
    def mesh(self) -> Mesh:
        return mesh_from_proto(self.description.mesh) if self.description else Mesh()

    @property
    def wants_text(self) -> bool:
        """Whether a reward scores text; any that does not say otherwise does."""
        return not self.description or self.description.input_form != worker_pb2.INPUT_FORM_TENSOR

    def stubs(self, method: Method, *, request: Any = None, response: Any = None) -> list[list[Any]]:
        """Callables of a method, by rank and connection. Requests and responses are bytes unless told otherwise."""
        return [
            [channel.unary_unary(method.path, request, response) for channel in channels]
            for channels in self._channels
        ]

    async def ask_all(self, name: str, request: Any) -> None:
        """One of the calls of WorkerService that every rank answers at once, within SETTLE_S. A rank that does not
        answer has died or never knew the call: there is nothing more to ask it for."""
        method = _WORKER[name]
        stubs = self.stubs(method, request=method.request.SerializeToString)  # type: ignore[attr-defined]
        answers = (connections[0](request, timeout=SETTLE_S) for connections in stubs)
        with contextlib.suppress(grpc.RpcError):
            await asyncio.gather(*answers)

    async def _connect(self) -> None:
        self._channels = [self._open(self.address, PLAIN_OPTIONS)]
        self.description = await self._describe()
        if self.description is None:
            return
        if self.description.role and self.description.role != self.role:
            raise ConfigError(f"{self.address} serves role {self.description.role}, not {self.role}")
        peers = [rank.endpoint.address for rank in self.description.ranks[1:]]
        self._channels += [self._open(address, CHANNEL_OPTIONS) for address in peers]

    def _open(self, address: str, options: Sequence[tuple[str, int]]) -> list[grpc.aio.Channel]:
        return [open_aio_channel(address, (*options, _OWN_CONNECTION)) for _ in range(self._connections)]

    async def _describe(self) -> worker_pb2.DescribeResponse | None:
        describe = self.stubs(
            _WORKER["Describe"],
            request=worker_pb2.DescribeRequest.SerializeToString,
            response=worker_pb2.DescribeResponse.FromString,
        )[0][0]
        try:
            return await describe(worker_pb2.DescribeRequest(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return None
            raise from_rpc_error(error, f"{self.address} Describe") from error

    async def _close(self) -> None:
        await asyncio.gather(*(channel.close() for channels in self._channels for channel in channels))


class Caller:
    """Calls of one method in a session of their own.

    Requests are serialised once, beforehand: a message is the concatenation of its fields, so a call costs only its
    header. Where the service has one rank, calls ask for no order; where it has several, every rank gets every
    call with the next sequence number, and the session supersedes the one before.

    Attributes:
        causes: Message of the first error of each code.
    """

    def __init__(
        self, target: Target, method: Method, requests: Sequence[Sequence[bytes]], timeout_s: float
    ) -> None:
        self.method = method
        self.causes: dict[str, str] = {}
        self._target = target
        self._requests = requests
        self._timeout_s = timeout_s
        self._stubs = target.stubs(method, response=method.response.FromString)  # type: ignore[attr-defined]
        self._session = f"loadtest-{uuid.uuid4().hex}"
        youngest = target.description.session_started_unix_ns if target.description else 0
        self._started_unix_ns = max(time.time_ns(), youngest + 1000)
        self._numbers = itertools.count()
        self._running: set[str] = set()
        takes_call = "call" in method.request.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
        self._has_header = takes_call and target.description is not None
        self._epoch = target.description.epoch if target.description else 0
        self._ordered = target.num_ranks > 1

    async def open(self) -> None:
        """Opens the session where calls have an order, so that it is there before two of them race to be the first.

        Raises:
            RlhfError: A rank refuses.
        """
        if not self._ordered or not self._has_header:
            return
        method = _WORKER["Synchronize"]
        _, request = self._header(next(self._numbers), method)
        stubs = self._target.stubs(method)
        try:
            await asyncio.gather(*(connections[0](request, timeout=CONNECT_S) for connections in stubs))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"{self._target.address} Synchronize") from error

    async def call(self) -> Reply:
        """One call, to all ranks where the method is the group's; ends within the timeout."""
        number = next(self._numbers)
        call_id, header = self._header(number, self.method)
        requests = self._requests[number % len(self._requests)]
        self._running.add(call_id)
        try:
            if len(requests) == 1:
                responses = [await self._send(0, number, header + requests[0])]
            else:
                sent = (self._send(rank, number, header + part) for rank, part in enumerate(requests))
                responses = await asyncio.gather(*sent)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            self.causes.setdefault(code, error.details() or "")
            self._running.discard(call_id)
            return Reply(code)
        self._running.discard(call_id)
        return self._reply(responses)

    async def release(self) -> None:
        """Frees the rows that the session's calls left in the service."""
        if self._has_header and self.method.outputs:
            request = worker_pb2.ReleaseRequest(session=self._session, all_steps=True)
            await self._target.ask_all("Release", request)

    async def cancel(self) -> None:
        """Asks the service to stop the calls whose callers have gone."""
        if self._has_header:
            requests = [worker_pb2.CancelRequest(call_id=call_id) for call_id in self._running]
            await asyncio.gather(*(self._target.ask_all("Cancel", request) for request in requests))

    def _header(self, number: int, method: Method) -> tuple[str, bytes]:
        call_id = f"{self._session}_{number}"
        if not self._has_header:
            return call_id, b""
        call = common_pb2.Call(
            call_id=call_id,
            session=self._session,
            session_started_unix_ns=self._started_unix_ns,
            sequence=number + 1 if self._ordered else 0,
            epoch=self._epoch,
            ordinal=number % 2**32,
        )
        return call_id, method.request(call=call).SerializeToString()

    def _send(self, rank: int, number: int, request: bytes) -> Any:
        connections = self._stubs[rank]
        return connections[number % len(connections)](request, timeout=self._timeout_s)

    def _reply(self, responses: Sequence[Any]) -> Reply:
        timings = [
            r.outcome.timing for r in responses if hasattr(r, "outcome") and r.outcome.HasField("timing")
        ]
        failed = next(filter(None, map(_row_error, responses)), "")
        if failed:
            self.causes.setdefault(ROW_ERROR, failed)
        return Reply(ROW_ERROR if failed else OK, timings)


def _row_error(response: Any) -> str:
    """Why a row of a reward's answer has no score; empty where all have."""
    if not isinstance(response, reward_pb2.ComputeRewardResponse):
        return ""
    for score in response.scores:
        if score.WhichOneof("verdict") in (None, "error"):
            return score.error or "no verdict"
    return ""
