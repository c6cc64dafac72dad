"""Calls of one method, as a run makes them: in a session, over streams where the service dispatches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from client.rank import WORKER, RankClient
from client.session import Session
from loadtest.target import CONNECT_S, Target, close_all
from rlhf.contract import Method
from rlhf.errors import RlhfError, one_line
from rlhf.v1 import common_pb2, reward_pb2, worker_pb2

SETTLE_S = 2.0
"""Timeout of Release and EndSession, in seconds."""
OK = "OK"
ROW_ERROR = "ROW_ERROR"
"""Code of a call whose response lacks the score of a row."""


@dataclass(frozen=True)
class Reply:
    """Outcome of one call.

    Attributes:
        code: Name of the gRPC status code, ROW_ERROR or UNFINISHED.
        timings: Times of the call that the ranks report, in rank order; empty where they report none.
    """

    code: str
    timings: Sequence[common_pb2.Timing] = ()


class Caller:
    """Async context manager that calls one method in a session. Entering opens the session; leaving ends it, so that
    its calls stop and its rows are freed.

    Requests are serialized once, beforehand: a message is the concatenation of its fields, so a call costs only its
    header. A service of one rank takes the calls in any order; of several ranks, each gets every call with the next
    sequence number, and the session supersedes the one before. A call is made once: a connection that breaks under a
    unary call is an error of that call.

    Args:
        target: The service.
        method: The method.
        requests: Serialized requests without headers: a list per call, cycled through, with a request per rank.
        timeout_s: Timeout of a call in seconds.

    Attributes:
        causes: Message of the first error of each code, by code.
    """

    def __init__(
        self, target: Target, method: Method, requests: Sequence[Sequence[bytes]], timeout_s: float
    ) -> None:
        self.causes: dict[str, str] = {}
        self._target = target
        self._method = method
        self._requests = requests
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._session = Session(name=f"loadtest-{uuid.uuid4().hex}")
        self._ordered = target.num_ranks > 1
        self._sequences = itertools.count(1)
        self._epoch = 0
        if target.description:
            self._session.claim_after([target.description.session_started_unix_ns])
            self._epoch = target.description.epoch
        takes_call = "call" in method.request.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
        self._has_header = takes_call and target.description is not None
        self._dispatches = target.dispatches and method.spec is not None
        self._clients: list[list[RankClient]] = []

    async def __aenter__(self) -> Self:
        """Makes the clients of all ranks. Where calls have an order, as with several ranks, also opens the session on
        all ranks, so that no two calls race to be its first.

        Raises:
            RlhfError: A rank refuses the session.
        """
        self._clients = self._target.clients(self._session.name if self._dispatches else "")
        try:
            if self._ordered and self._has_header:
                method = WORKER["Synchronize"]
                request = self._header(method)
                await asyncio.gather(
                    *(connections[0].call(method, request, CONNECT_S) for connections in self._clients)
                )
        except BaseException:
            await close_all(self._clients)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends the session on all ranks, waiting at most SETTLE_S seconds, and closes the clients. Errors of ranks are
        ignored. Where calls have no header, only closes the clients."""
        if self._has_header:
            await self._ask_all("EndSession", worker_pb2.EndSessionRequest(session=self._session.name))
        await close_all(self._clients)

    async def call(self) -> Reply:
        """Makes one call, with the next request of the cycle, and returns its outcome. It goes to all ranks or, where
        there is a single request, to rank 0. Takes at most about `timeout_s`. Does not raise where the call fails: the
        Reply has another code than OK then."""
        number = next(self._numbers)
        header = self._header(self._method)
        requests = self._requests[number % len(self._requests)]
        try:
            if len(requests) == 1:
                responses = [await self._send(0, number, header + requests[0])]
            else:
                sent = (self._send(rank, number, header + part) for rank, part in enumerate(requests))
                responses = await asyncio.gather(*sent)
        except RlhfError as error:
            code, cause = _code_and_cause(error)
            self.causes.setdefault(code, cause)
            return Reply(code)
        return self._reply(responses)

    async def release(self) -> None:
        """Frees the rows that the session's calls have left in the service, in up to SETTLE_S seconds. Does nothing for
        a method without outputs or a service that does not describe itself; errors are ignored."""
        if self._has_header and self._method.outputs:
            request = worker_pb2.ReleaseRequest(session=self._session.name, all_steps=True)
            await self._ask_all("Release", request)

    def _header(self, method: Method) -> bytes:
        """Returns the serialized header of the next call of a method: with a new call id, the session's newest step and
        its next ordinal, and the next sequence number where calls are ordered, else 0. Returns b"" where the service
        reads no header."""
        if not self._has_header:
            return b""
        call = self._session.header(self._session.newest, self._target.role, method.snake_name)
        call.epoch = self._epoch
        call.sequence = next(self._sequences) if self._ordered else 0
        return method.request(call=call).SerializeToString()

    def _send(self, rank: int, number: int, request: bytes) -> Awaitable[Any]:
        connections = self._clients[rank]
        client = connections[number % len(connections)]
        if self._dispatches:
            return client.start(self._method, request, self._timeout_s)
        return client.call(self._method, request, self._timeout_s)

    async def _ask_all(self, name: str, request: Any) -> None:
        """Calls a method of WorkerService on every rank and waits for all answers; ignores errors of ranks that died or
        do not serve it."""

        async def ask(client: RankClient) -> None:
            with contextlib.suppress(RlhfError):
                await client.call(WORKER[name], request, SETTLE_S)

        await asyncio.gather(*(ask(connections[0]) for connections in self._clients))

    def _reply(self, responses: Sequence[Any]) -> Reply:
        timings = [
            r.outcome.timing for r in responses if hasattr(r, "outcome") and r.outcome.HasField("timing")
        ]
        failed = next(filter(None, map(_row_error, responses)), "")
        if failed:
            self.causes.setdefault(ROW_ERROR, failed)
        return Reply(ROW_ERROR if failed else OK, timings)


def _code_and_cause(error: RlhfError) -> tuple[str, str]:
    """Returns the name of the gRPC status code and the message of a failed call: those of the gRPC error that caused
    `error`, or else those of `error` itself."""
    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return cause.code().name, one_line(cause.details() or "")
    return error.code.name, str(error)


def _row_error(response: Any) -> str:
    """Returns the reason that a row in a reward's response has no score; empty where all rows have one."""
    if not isinstance(response, reward_pb2.ComputeRewardResponse):
        return ""
    for score in response.scores:
        if score.WhichOneof("verdict") in (None, "error"):
            return one_line(score.error) or "no verdict"
    return ""
