"""Calls on one rank: each runs once, in sequence order, on one compute thread, within its deadline."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from nccl_transfer.fetch import Fetcher
from nccl_transfer.store.store import TensorStore
from rlhf.contract import Method
from rlhf.errors import (
    InvalidRequest,
    Refused,
    ServiceLost,
    drop_frames,
)
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.calls import ActiveCall
from services.runtime.introductions import Introductions
from services.runtime.phases import RankPhase
from services.runtime.responses import ResponseMemory
from services.runtime.runner import CallRunner
from services.runtime.sessions import CurrentSession, check_name
from services.runtime.turn_queue import TurnQueue
from services.runtime.worker import CallContext, Registration, Worker

GRACE_S = 5.0
"""How long the running call may take to end in a drain, and the worker to close."""


class CallQueue:
    """Orders and runs the calls of one rank. Used from the event loop.

    A call is admitted or refused; `CallRunner` runs it; its response is remembered for retries.

    Attributes:
        session: The session whose calls it runs.
        phase: Phase of the rank, for Watch.
    """

    def __init__(self, worker: Worker, store: TensorStore, fetcher: Fetcher) -> None:
        self.worker = worker
        self._store = store
        self.session = CurrentSession(self._end_session)
        self.phase = RankPhase()
        self._introductions = Introductions(lambda: (store.endpoint, *worker.ranks.endpoints))
        self._responses = ResponseMemory()
        self._turns = TurnQueue()
        self._runner = CallRunner(worker, store, fetcher, self.session, self._turns, self.phase)
        self._calls: dict[str, ActiveCall] = {}

    def start(
        self, method: Method, registration: Registration, request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        """Runs a call, or joins the one with its id; the future is of the call's response. Await it shielded, since
        other callers may await it too.

        Raises:
            RlhfError: As in the proto of the method, here or from the future.
        """
        call = request.call
        check_name("call.call_id", call.call_id)
        check_name("call.session", call.session)
        if not call.call_id:
            if self.worker.ranks.size > 1:
                raise InvalidRequest(f"{method.name}: call.call_id is missing")
            call.call_id = uuid.uuid4().hex
        known = self._responses.find(method, call)
        return known if known is not None else self._admit(method, registration, request, timeout_s)

    def knows(self, call_id: str) -> bool:
        """Whether a call with this id has arrived, and its response is to come or remembered."""
        return call_id in self._responses

    async def wait(self, call_id: str, response: asyncio.Future[Any], *, hold: bool = False) -> Any:
        """The response, for one of the callers of a call. When the last of them has left, the call is stopped.

        Args:
            response: From `start`.
            hold: The caller is a session's stream of calls.
        """
        call = self._calls.get(call_id)
        if call is None:
            return await asyncio.shield(response)
        call.callers += 1
        call.is_held |= hold
        try:
            return await asyncio.shield(response)
        finally:
            call.callers -= 1
            if not (call.callers or call.is_held or response.done()):
                self._runner.stop(call)

    async def outcome(self, call_id: str, response: asyncio.Future[Any], within_s: float) -> Any:
        """The response of a call that is past its caller's deadline, if it ends within `within_s` seconds.

        Raises:
            DeadlineExceeded: It does not; the text says whether it makes progress.
        """
        await asyncio.wait([response], timeout=within_s)
        if not response.done():
            self._calls[call_id].raise_late(self.worker.progressed_at)
        return response.result()

    def introduce(self, session: str, endpoints: Sequence[common_pb2.Endpoint]) -> None:
        """Lets calls of the current session name these endpoints.

        Raises:
            Refused: The session is not the current one.
            InvalidRequest: As of `Introductions.add`.
        """
        if not session or session != self.session.name:
            raise Refused(f"session {session!r} is not the current one, so it introduces nobody")
        self._introductions.add(session, endpoints)

    def cancel(self, call_id: str) -> bool:
        """Asks a call to stop; False where it is not here or has ended."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        self._runner.stop(call)
        return True

    async def drain(self) -> None:
        """Lets the running call end, refuses all others, closes the worker, and frees the threads."""
        self.phase.set(worker_pb2.PHASE_DRAINING, self.phase.call)
        self._turns.wake()
        if to_come := self._responses.to_come:
            await asyncio.wait(to_come, timeout=GRACE_S)
        await self._runner.close(GRACE_S)

    def _end_session(self, name: str) -> None:
        """Stops a session's calls, frees its rows, and forgets its introductions."""
        for call in self._calls.values():
            if call.context.call.session == name:
                self._runner.stop(call)
        self._store.end(name)
        self._introductions.forget(name)
        self._turns.wake()

    def _admit(
        self, method: Method, registration: Registration, request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        header: common_pb2.Call = request.call
        self._check(header)
        if header.sequence and header.session != self.session.name:
            self.session.open(header)
            self._turns.begin_session(header.session)
        self._check_endpoints(method, request)
        call = ActiveCall(
            method,
            registration,
            request,
            CallContext(
                header,
                time.monotonic() + timeout_s,
                stuck_timeout_s=self.worker.table.stuck_timeout_s,
            ),
            common_pb2.Timing(arrived_unix_s=time.time()),
            self._turns.join(header.session, header.sequence),
        )
        if registration.instant and self._turns.begin_at_once(call.ticket):
            response = self._runner.run_at_once(call)
        else:
            self._calls[header.call_id] = call
            response = asyncio.create_task(_without_frames(self._runner.run(call)))
            response.add_done_callback(partial(self._forget, call))
        self._responses.add(method, header, response)
        return response

    def _check(self, header: common_pb2.Call) -> None:
        """Raises where this rank takes no call of this kind now."""
        ranks = self.worker.ranks
        if self.phase.is_draining:
            raise ServiceLost("the service is shutting down")
        if header.epoch not in (0, ranks.epoch):
            raise Refused(
                f"call of epoch {header.epoch}, but the service is in epoch {ranks.epoch}: it was restarted"
            )
        if header.sequence == 0 and ranks.size > 1:
            raise InvalidRequest(
                f"call.sequence is missing; the service has {ranks.size} ranks, which need an order"
            )

    def _check_endpoints(self, method: Method, request: Any) -> None:
        """Raises InvalidRequest where a batch names endpoints that its session has not introduced. This ends the call
        before its turn, and no later one waits for it."""
        if not method.takes_rows or not request.HasField("batch"):
            return
        try:
            self._introductions.check(request.call.session, request.batch.endpoints)
        except InvalidRequest:
            if request.call.sequence:
                self._turns.abandon(request.call.session, request.call.sequence)
            raise

    def _forget(self, call: ActiveCall, response: asyncio.Future[Any]) -> None:
        """The call has ended."""
        del self._calls[call.call_id]
        self._runner.drop_rows(call)


async def _without_frames(run: Awaitable[Any]) -> Any:
    """Awaits a call; drops the frames of its error, since a response is remembered for retries and frames hold rows.
    The frames go before the task ends with the error: the task keeps the traceback apart from it."""
    try:
        return await run
    except Exception as error:
        drop_frames(error)
        raise
