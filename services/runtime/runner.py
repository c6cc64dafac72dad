"""Runs a call on one rank: starts to fetch its rows, waits for its turn, waits for the other ranks, and computes."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from nccl_transfer.fetch import Fetcher
from nccl_transfer.store.store import TensorStore
from rlhf.errors import CallCancelled, DeadlineExceeded, OutOfStep, ShuttingDown
from rlhf.v1 import worker_pb2
from services.runtime.call_barrier import CallBarrier, Note, note_of
from services.runtime.calls import ActiveCall
from services.runtime.compute import ComputeThread
from services.runtime.deadlines import ANSWER_S
from services.runtime.encoding import ResponseEncoder
from services.runtime.fetches import MOST_ABANDONED, Abandoned, FetchQueue, ends_in_time, fetch_rows
from services.runtime.phases import RankPhase
from services.runtime.sessions import Sessions
from services.runtime.turn_queue import TurnQueue
from services.runtime.turns import Ticket
from services.runtime.worker import NO_ROWS, CallRows, Worker


class CallRunner:
    """Runs the calls that `CallQueue` has admitted on one rank. Not thread-safe: used from the event loop alone.

    Args:
        worker: Worker whose methods are run.
        store: Store that keeps the rows of responses.
        fetcher: Fetches the rows of requests.
        sessions: Sessions whose calls the rank runs.
        turns: Queue that issued the ticket of each call.
        phase: Phase of the rank, which is updated as calls run.
    """

    def __init__(
        self,
        worker: Worker,
        store: TensorStore,
        fetcher: Fetcher,
        sessions: Sessions,
        turns: TurnQueue,
        phase: RankPhase,
    ) -> None:
        self._worker = worker
        self._store = store
        self._fetcher = fetcher
        self._sessions = sessions
        self._turns = turns
        self._phase = phase
        self._abandoned: Abandoned = set()
        self._fetches = {"": FetchQueue(self._abandoned)}
        self._calls: dict[Ticket, ActiveCall] = {}
        others = self._notes_of_others if sessions.is_shared else None
        self._barrier = CallBarrier(worker.ranks, worker.leave, others)
        self._compute = ComputeThread(worker, ResponseEncoder(worker, store), phase, sessions.check)

    def stop(self, call: ActiveCall) -> None:
        """Asks a call to stop, whether it fetches, waits or computes; returns immediately."""
        call.context.cancelled = True
        call.stopped.set()
        self.drop_rows(call)
        self._turns.wake()

    def drop_rows(self, call: ActiveCall) -> None:
        """Cancels the fetch of a call's rows, if it has one that is not complete."""
        if call.fetch is not None:
            self._fetches_of(call).drop(call.fetch)

    def end_session(self, name: str) -> None:
        """Ends the transfer thread of a session, if it has one of its own; its calls must have been stopped."""
        if name and name in self._fetches:
            self._fetches.pop(name).close()

    async def close(self, within_s: float) -> None:
        """Closes the worker and ends the compute thread, waiting at most `within_s` seconds, and then ends the
        transfer thread."""
        await self._compute.close(within_s)
        for fetches in self._fetches.values():
            fetches.close()

    def run_at_once(self, call: ActiveCall) -> asyncio.Future[Any]:
        """Runs an instant call whose turn has begun, on this thread, and ends the turn; returns a future that is
        already done, with its response or its error."""
        response = asyncio.get_running_loop().create_future()
        try:
            response.set_result(self._compute.run_at_once(call))
        except Exception as error:  # noqa: BLE001 - raised where the response is awaited
            response.set_exception(error)
        self._end_turn(call)
        return response

    async def run_beside(self, call: ActiveCall) -> Any:
        """Runs a call concurrently with ordered calls; returns the response message of its method, or raises its
        error. A call that is stopped since the rank shuts down raises ShuttingDown."""
        try:
            return await self._compute.run(call, NO_ROWS, None)
        except CallCancelled as error:
            self._check_open(error)
            raise

    async def run(self, call: ActiveCall) -> Any:
        """Runs a call from its fetch to its response; returns the response message of its method. A call that fails
        while it waits for its turn leaves the phase of the rank as it is.

        Raises:
            RlhfError: One of the errors that the proto names for the method.
        """
        self._calls[call.ticket] = call
        try:
            self._begin_fetch(call)
            if self._sessions.is_shared:
                # A fetch from a rank that has died lasts until its deadline; other sessions do not wait for it.
                await self._fetched(call)
            response = None
            while response is None:
                await self._wait_for_turn(call)
                response = await self._run_turn(call)
            return response
        finally:
            del self._calls[call.ticket]

    async def _run_turn(self, call: ActiveCall) -> Any:
        """Runs a call whose turn has begun and ends the turn; returns the response message of its method. Returns None
        if the call has given way to one of another session and has to wait for another turn."""
        first = None
        try:
            if call.registration.instant:
                return self._compute.run_at_once(call)
            self._phase.set(worker_pb2.PHASE_FETCHING, call)
            rows, failure = await self._fetched(call)
            if call.ticket.meets:
                self._turns.await_peers(call.ticket)
                first = await self._meet(call)
                if first is not None:
                    return None
                await self._turns.resume(call.ticket)
            self._phase.set(worker_pb2.PHASE_COMPUTING, call)
            if self._sessions.is_shared:
                call.context.others = self._sessions.names - {call.context.call.session}
            return await self._compute.run(call, rows, failure)
        except OutOfStep as error:
            asyncio.get_running_loop().call_later(ANSWER_S, self._worker.leave, str(error))
            raise
        finally:
            self._phase.set(worker_pb2.PHASE_IDLE, None)
            if first is None:
                self._end_turn(call)
            else:
                self._turns.give_way(call.ticket, first)

    def _begin_fetch(self, call: ActiveCall) -> None:
        """Queues the fetch of a call's rows, if it has any and was not stopped."""
        if call.has_batch and not call.stopped.is_set():
            call.fetch = self._fetches_of(call).add(
                partial(
                    fetch_rows,
                    self._fetcher,
                    call.request.batch,
                    call.context,
                    call.timing,
                    writable=self._worker.writes_to_rows,
                    on_device=self._worker.on_device,
                )
            )

    def _fetches_of(self, call: ActiveCall) -> FetchQueue:
        """Returns the queue of a call's fetch. Sessions that share the service have queues of their own: those of two
        sessions may be in different orders on ranks that relay rows to each other."""
        header = call.context.call
        name = header.session if header.sequence and self._sessions.is_shared else ""
        # At the limit they share one, since the thread of each may outlive its session.
        has_room = len(self._abandoned) < MOST_ABANDONED
        if name not in self._fetches and name in self._sessions.names and has_room:
            self._fetches[name] = FetchQueue(self._abandoned)
        return self._fetches.get(name, self._fetches[""])

    def _notes_of_others(self) -> list[Note]:
        """Returns the notes of the calls that wait for the turn of another session's call alone."""
        calls = (self._calls[ticket] for ticket in self._turns.heads)
        return [note_of(call.method, call.request) for call in calls]

    async def _wait_for_turn(self, call: ActiveCall) -> None:
        """Waits until it is the call's turn, and begins the turn.

        Raises:
            DeadlineExceeded: The turn did not come before the call's deadline.
            RlhfError: One of the errors of `_check_waiting`.
        """
        context, since = call.context, time.monotonic()
        try:
            await self._turns.begin(call.ticket, context.deadline, partial(self._check_waiting, call))
        except TimeoutError:
            running = self._phase.call
            number = self._turns.next_of(context.call.session)
            behind = running.method.name if running else f"call {number}, which never came"
            raise DeadlineExceeded(
                f"{call.method.name} (sequence {context.call.sequence}) waited past its deadline behind {behind}"
            ) from None
        call.timing.queue_s += time.monotonic() - since

    def _check_waiting(self, call: ActiveCall) -> None:
        """Raises if a call may neither wait for its turn any longer nor take it.

        Raises:
            Refused: The call's session has ended.
            ShuttingDown: The rank is shutting down.
            CallCancelled: The call was cancelled, on a service of one rank.
        """
        self._sessions.check(call.context.call)
        self._check_open()
        # Where there are peers, a cancelled call takes its turn, so that all ranks drop it at the same place.
        if call.context.cancelled and self._worker.ranks.size == 1:
            raise CallCancelled(f"call {call.call_id} was cancelled before it started")

    def _check_open(self, cause: Exception | None = None) -> None:
        """Raises ShuttingDown, from `cause`, if the rank is shutting down."""
        if self._phase.is_draining:
            raise ShuttingDown("the service is shutting down") from cause

    def _end_turn(self, call: ActiveCall) -> None:
        """Ends the call's turn, so that the next call may begin, and frees its rows if its session has ended
        meanwhile."""
        self._turns.end(call.ticket)
        header = call.context.call
        if header.sequence and header.session not in self._sessions.names:
            # The call outlived its session, whose end has freed only the rows that were there.
            self._store.release(header.session)

    async def _fetched(self, call: ActiveCall) -> tuple[CallRows, Exception | None]:
        """Waits for the rows of a call; returns (rows, None), or (NO_ROWS, error) if the fetch failed, was cancelled,
        or has not ended in time, see `ends_in_time`. A call without rows gives (NO_ROWS, None)."""
        if call.fetch is None:
            return NO_ROWS, None
        waited, late = time.monotonic(), f"{call.method.name}: its rows were not there by its deadline"
        if not await ends_in_time(call.fetch, call.context.deadline):
            self.drop_rows(call)
            call.fetch = asyncio.get_running_loop().create_future()
            call.fetch.set_exception(DeadlineExceeded(late))
        if call.fetch.cancelled():
            return NO_ROWS, CallCancelled(f"call {call.call_id} was cancelled while it fetched")
        if error := call.fetch.exception():
            return NO_ROWS, error if isinstance(error, Exception) else RuntimeError(str(error))
        rows = call.fetch.result()
        call.timing.fetch_s += time.monotonic() - waited
        call.timing.fetched_bytes = rows.fetched.fetched_bytes
        return rows, None

    async def _meet(self, call: ActiveCall) -> Ticket | None:
        """Waits until every rank of the service is ready to begin this call, and returns None; or until all have agreed
        to begin a call of another session first, and returns the ticket of that one.

        Raises:
            CallCancelled: The call was cancelled while it waited.
            DeadlineExceeded: A rank was not ready before the call's deadline.
            RlhfError: As `CallBarrier.meet`, or Refused if the call's session has ended.
        """
        context, mine = call.context, note_of(call.method, call.request)
        note = await self._barrier.meet(mine, call.stopped, context.deadline)
        if note == mine:
            return None
        if note is not None:
            others = (self._calls[ticket] for ticket in self._turns.heads)
            return next(
                (each.ticket for each in others if note_of(each.method, each.request) == note), call.ticket
            )
        self._sessions.check(context.call)
        if context.cancelled:
            raise CallCancelled(f"call {call.call_id} was cancelled before it started")
        raise DeadlineExceeded(
            f"{call.method.name} ({call.call_id}) did not start: not every rank was sent it before its deadline"
        )
