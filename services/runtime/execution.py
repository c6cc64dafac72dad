"""Queue of the calls on one rank. Each call runs once, in the order of sequence numbers, on one compute thread;
retries receive the response of the first attempt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import Any

from nccl_transfer.fetch import Fetcher
from nccl_transfer.store.store import TensorStore
from rlhf.contract import Method
from rlhf.errors import (
    InvalidRequest,
    Refused,
    Restarted,
    ShuttingDown,
    TooManyCalls,
    drop_frames,
)
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.calls import ActiveCall
from services.runtime.introductions import Introductions
from services.runtime.phases import RankPhase
from services.runtime.responses import ResponseMemory
from services.runtime.runner import CallRunner
from services.runtime.sessions import Sessions, check_name
from services.runtime.turn_queue import TurnQueue
from services.runtime.turns import Ticket
from services.runtime.worker import CallContext, Registration, Worker

MAX_BESIDE = 16
"""Maximum number of waiting calls that run concurrently with ordered calls."""
GRACE_S = 5.0
"""Seconds that `CallQueue.drain` waits for the running call to end, and then for the worker to close."""


class CallQueue:
    """Orders and runs the calls of one rank. Not thread-safe: used from the event loop alone.

    A call is admitted or refused here; `CallRunner` runs it; its response is kept for retries.

    Args:
        worker: Worker whose methods are run.
        store: Store that keeps the rows of responses.
        fetcher: Fetches the rows of requests.

    Attributes:
        sessions: The sessions whose calls the rank runs.
        phase: Phase of the rank, which Watch reports.
    """

    def __init__(self, worker: Worker, store: TensorStore, fetcher: Fetcher) -> None:
        self.worker = worker
        self._store = store
        self.sessions = Sessions(
            self._end_session,
            is_shared=worker.is_frozen,
            is_busy=lambda session: any(self._calls_of(session)),
        )
        self.phase = RankPhase()
        self._introductions = Introductions(
            lambda: (store.endpoint, *worker.ranks.endpoints),
            lambda adverts: fetcher.check_adverts(adverts),
            lambda endpoint: fetcher.forget(endpoint),
        )
        self._responses = ResponseMemory()
        self._turns = TurnQueue()
        self._runner = CallRunner(worker, store, fetcher, self.sessions, self._turns, self.phase)
        self._calls: dict[str, ActiveCall] = {}

    def start(
        self, method: Method, registration: Registration, request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        """Queues a call; if a call with the same id is known, joins that one instead.

        Args:
            method: Method that is called.
            registration: How the worker has registered the method.
            request: Request message. A call without an id is given one if the service has one rank, and is refused
                otherwise.
            timeout_s: Seconds that the call may take.

        Returns:
            Future of the response message. Other callers may await it too, so await it through `wait` or shielded.

        Raises:
            InvalidRequest, Refused, ShuttingDown, TooManyCalls: The call is refused. Errors of a call that was admitted
                are raised by the future.
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
        """Returns whether a call with this id is queued or running, or has ended and its response is still kept."""
        return call_id in self._responses

    async def wait(self, call_id: str, response: asyncio.Future[Any], *, hold: bool = False) -> Any:
        """Waits for the response of a call on behalf of one caller, and returns it or raises the call's error. If
        every caller's wait is cancelled, the call is stopped, unless one of them has set `hold`.

        Args:
            call_id: Id of the call.
            response: Future that `start` returned.
            hold: Whether the call continues without callers until its session ends. For a session's Dispatch stream,
                which may break and be reopened.
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
        """Waits up to `within_s` seconds for a call whose caller's deadline has passed; returns its response.

        Raises:
            DeadlineExceeded: The call has not ended by then; the message says whether it makes progress.
            RlhfError: The call has failed.
        """
        await asyncio.wait([response], timeout=within_s)
        if not response.done():
            self._calls[call_id].raise_late(self.worker.progressed_at)
        return response.result()

    def introduce(self, session: str, endpoints: Sequence[common_pb2.Endpoint]) -> None:
        """Allows batches of an open session to refer to rows at these endpoints, until the session ends.

        Raises:
            Refused: The session is not open.
            InvalidRequest: An endpoint is invalid, or the session has too many.
        """
        if not session or session not in self.sessions.names:
            raise Refused(f"session {session!r} is not open on this rank, so its endpoints are not accepted")
        self._introductions.add(session, endpoints)

    def cancel(self, call_id: str) -> bool:
        """Asks a call to stop and returns True without waiting for its end; returns False if no call with this id is
        queued or running."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        self._runner.stop(call)
        return True

    async def drain(self) -> None:
        """Shuts the queue down: refuses all calls but the running one, waits up to GRACE_S for that, and then, again
        up to GRACE_S, for the worker to close; ends the threads."""
        self.phase.set(worker_pb2.PHASE_DRAINING, self.phase.call)
        for call in self._beside:
            self._runner.stop(call)
        self._turns.wake()
        if to_come := self._responses.to_come:
            await asyncio.wait(to_come, timeout=GRACE_S)
        await self._runner.close(GRACE_S)

    def _end_session(self, name: str) -> None:
        """Stops a session's calls, frees its rows, and forgets its introductions."""
        for call in self._calls_of(name):
            self._runner.stop(call)
        self._store.end(name)
        self._introductions.forget(name)
        self._runner.end_session(name)
        self._turns.end_session(name)

    def _admit(
        self, method: Method, registration: Registration, request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        """Queues a new call, or raises if it is refused; returns the future of its response. A call with a sequence
        number whose session is not open opens its session first. An instant call whose turn it is has run when this
        returns."""
        header: common_pb2.Call = request.call
        beside = not header.sequence and method.snake_name in self.worker.beside
        self._check(header, beside=beside)
        if header.sequence and header.session not in self.sessions.names:
            self.sessions.open(header)
            self._store.begin(header.session)
            self._turns.begin_session(header.session)
        self.sessions.check(header)
        self.sessions.noticed(header.session)
        self._check_endpoints(method, request)
        meets = registration.collective and self.worker.ranks.size > 1
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
            Ticket(header.session, 0, 0)
            if beside
            else self._turns.join(header.session, header.sequence, meets=meets),
            beside=beside,
        )
        if registration.instant and self._turns.begin_at_once(call.ticket):
            response = self._runner.run_at_once(call)
        else:
            self._calls[header.call_id] = call
            run = self._runner.run_beside if beside else self._runner.run
            response = asyncio.create_task(_without_frames(run(call)))
            response.add_done_callback(partial(self._forget, call))
        self._responses.add(method, header, response)
        return response

    def _calls_of(self, session: str) -> Iterator[ActiveCall]:
        """Yields the calls of a session that wait or run."""
        return (call for call in self._calls.values() if call.context.call.session == session)

    @property
    def _beside(self) -> list[ActiveCall]:
        """The calls that run or wait concurrently with ordered calls."""
        return [call for call in self._calls.values() if call.beside]

    def _check(self, header: common_pb2.Call, *, beside: bool) -> None:
        """Raises if this rank may not admit a call with this header.

        Args:
            beside: Whether the call is to run concurrently with ordered calls.

        Raises:
            ShuttingDown: The rank is shutting down.
            Restarted: The call is of an earlier epoch: the service has been restarted since.
            Refused: `beside` is set and its session is not open.
            TooManyCalls: `beside` is set and MAX_BESIDE such calls wait already.
            InvalidRequest: The call has no sequence number, which a service of several ranks requires.
        """
        ranks = self.worker.ranks
        if self.phase.is_draining:
            raise ShuttingDown("the service is shutting down")
        if header.epoch not in (0, ranks.epoch):
            raise Restarted(
                f"call of epoch {header.epoch}, but the service is in epoch {ranks.epoch}: it was restarted"
            )
        if beside and header.session not in self.sessions.names:
            raise Refused(
                f"session {header.session!r} is not open on this rank, so its calls cannot run concurrently with "
                "ordered calls"
            )
        if beside and len(self._beside) >= MAX_BESIDE:
            raise TooManyCalls(f"{MAX_BESIDE} calls without an order wait already; try again later")
        if header.sequence == 0 and ranks.size > 1 and not beside:
            raise InvalidRequest(
                f"call.sequence is missing; the service has {ranks.size} ranks, which need an order"
            )

    def _check_endpoints(self, method: Method, request: Any) -> None:
        """Raises InvalidRequest if the request's batch, or its transfer of weights, names a source that its session has
        not introduced; later calls then do not wait for this one's sequence number."""
        named = [*request.batch.endpoints] if method.takes_rows else []
        if method.moves_weights:
            named += [source.endpoint for source in request.transfer.sources]
        if not named:
            return
        try:
            self._introductions.check(request.call.session, named)
        except InvalidRequest:
            if request.call.sequence:
                self._turns.abandon(request.call.session, request.call.sequence)
            raise

    def _forget(self, call: ActiveCall, response: asyncio.Future[Any]) -> None:
        """Removes a call that has ended from the calls that can be stopped, and drops its rows."""
        del self._calls[call.call_id]
        self._runner.drop_rows(call)
        self.sessions.noticed(call.context.call.session)


async def _without_frames(run: Awaitable[Any]) -> Any:
    """Awaits a call and returns its response; removes the stack frames from its error, if it fails. The error is kept
    for retries, and its frames would keep the call's rows in memory."""
    try:
        return await run
    except Exception as error:
        drop_frames(error)
        raise
