"""Calls on one rank: each runs once, in sequence order, on one compute thread, within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.relay import RelayRequest
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import traffic_since, traffic_to_proto
from rlhf.contract import Method
from rlhf.errors import (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutOfStep,
    PeerFailed,
    Refused,
    ServiceLost,
    drop_frames,
)
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.introductions import Introductions
from services.runtime.meetings import Meetings
from services.runtime.ranks import ALONE_S, is_known_to_all
from services.runtime.sessions import CurrentSession, check_name
from services.runtime.worker import NO_ROWS, CallContext, CallResult, CallRows, Registration, Worker

REMEMBERED_CALLS = 256
"""Results kept for retries; far more than a controller has in flight."""

REMEMBERED_BYTES = 16 << 20
"""Size of the results kept for retries, as they are serialized: references to many rows are a mebibyte a call."""

GRACE_S = 5.0
"""How long a call may take to end in a drain."""

MISSING_S = 5.0
"""How long a call waits for an earlier one that has not come: over a stream calls come in their order."""

LONGEST_S = 30 * 86_400.0
"""Longest that a call may take: clocks and timers count no further than some centuries."""

ANSWER_S = 0.5
"""Left of a deadline for the answer, so that the caller hears what was late and not only that its time is up."""


@dataclass
class Running:
    """A call from its arrival to its response. What is remembered of it after that is the response alone, and not
    the rows it fetched.

    Attributes:
        fetch: Its rows, on their way since it arrived.
        stopped: Set together with the context's `cancelled`, for the event loop.
        callers: How many wait for it who leave when their connection does.
        is_held: Whether a session's stream of calls brought it, which may break and come again: until the session
            ends, it is waited for.
    """

    method: Method
    context: CallContext
    timing: common_pb2.Timing
    fetch: asyncio.Future[CallRows] | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    callers: int = 0
    is_held: bool = False


class CallQueue:
    """Orders and runs the calls of one rank. Used from the event loop; computes on a thread of its own.

    Attributes:
        session: Whose calls it runs.
        phase: What the rank is doing.
        running: The call in turn, None when idle.
        changed: Set at the next change of the two; the one after has an event of its own.
    """

    def __init__(self, worker: Worker, store: TensorStore, fetcher: Fetcher) -> None:
        self.worker = worker
        self.store = store
        self.fetcher = fetcher
        self.phase = worker_pb2.PHASE_IDLE
        self.running: Running | None = None
        self.changed = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, "compute", initializer=worker.prepare_thread)
        self._transfer = ThreadPoolExecutor(1, "transfer")
        self._meetings = Meetings(worker.ranks)
        self._calls: dict[str, Running] = {}
        self._responses: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._names: dict[str, tuple[str, str]] = {}
        """By id of the calls that are known, method and session."""
        self._remembered_bytes = 0
        self.session = CurrentSession(self._end_session)
        self._introductions = Introductions(lambda: (store.endpoint, *worker.ranks.endpoints))
        self._next = 1
        self._busy = False
        self._waiting: dict[asyncio.Future[None], common_pb2.Call] = {}
        self._abandoned: set[int] = set()
        self._draining = False

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
        known = self._responses.get(call.call_id)
        if known is None:
            return self._admit(method, registration, request, timeout_s)
        if self._names[call.call_id] != (method.path, call.session):
            raise InvalidRequest(f"{method.name}: call {call.call_id} was another one; an id is used once")
        return known

    def knows(self, call_id: str) -> bool:
        """Whether a call came here, and its response is to come or remembered."""
        return call_id in self._responses

    async def wait(self, call_id: str, response: asyncio.Future[Any], *, hold: bool = False) -> Any:
        """The response, for one of the callers of a call. When the last of them has left, it is stopped.

        Args:
            response: What `start` returned.
            hold: The caller is a session's stream of calls.
        """
        known = self._calls.get(call_id)
        if known is None:
            return await asyncio.shield(response)
        known.callers += 1
        known.is_held |= hold
        try:
            return await asyncio.shield(response)
        finally:
            known.callers -= 1
            if not (known.callers or known.is_held or response.done()):
                self._stop(known)

    async def outcome(self, call_id: str, response: asyncio.Future[Any], within_s: float) -> Any:
        """The response of a call that is past its caller's deadline, if it ends within a few seconds more.

        Raises:
            DeadlineExceeded: It does not; the text says whether it gets on.
        """
        await asyncio.wait([response], timeout=within_s)
        return response.result() if response.done() else self._tell_late(self._calls[call_id])

    def _tell_late(self, known: Running) -> NoReturn:
        name, context = known.method.name, known.context
        since_s = time.monotonic() - max(context.progressed_at, self.worker.progressed_at)
        is_known = since_s < time.time() - known.timing.arrived_unix_s
        when = f"the last {since_s:.1f} s ago" if is_known else "none so far"
        done = f", {context.done} of {context.done_of} done" if context.done_of else ""
        raise DeadlineExceeded(f"{name} ran past its deadline and goes on{done}; signs of progress: {when}")

    def _end_session(self, name: str) -> None:
        """Stops a session's calls, frees its rows, and keeps no more for it."""
        for known in self._calls.values():
            if known.context.call.session == name:
                self._stop(known)
        self.store.end(name)
        self._introductions.forget(name)
        self._wake()

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
        known = self._calls.get(call_id)
        if known is None or self._responses[call_id].done():
            return False
        self._stop(known)
        return True

    def _stop(self, known: Running) -> None:
        known.context.cancelled = True
        known.stopped.set()
        if known.fetch is not None and not known.fetch.done():
            # It ends by its deadline; calls that are still wanted do not wait for that.
            self._transfer.shutdown(wait=False)
            self._transfer = ThreadPoolExecutor(1, "transfer")
        self._wake()

    async def drain(self) -> None:
        """Lets the running call end, refuses all others, closes the worker, and frees the threads."""
        self._draining = True
        self._set_phase(worker_pb2.PHASE_DRAINING, self.running)
        awaited = [self._responses[call_id] for call_id in self._calls]
        if awaited:
            await asyncio.wait(awaited, timeout=GRACE_S)
        closing = asyncio.get_running_loop().run_in_executor(self._compute, self.worker.close)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, GRACE_S)
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._transfer.shutdown(wait=False, cancel_futures=True)

    def _admit(
        self, method: Method, registration: Registration, request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        call = request.call
        ranks = self.worker.ranks
        if self._draining:
            raise ServiceLost("the service is shutting down")
        if call.epoch not in (0, ranks.epoch):
            raise Refused(
                f"call of epoch {call.epoch}, but the service is in epoch {ranks.epoch}: it was restarted"
            )
        if call.sequence == 0 and ranks.size > 1:
            raise InvalidRequest(
                f"call.sequence is missing; the service has {ranks.size} ranks, which need an order"
            )
        if call.sequence and call.session != self.session.name:
            self._open_session(call)
        self._check_endpoints(method, request)
        if call.sequence and call.sequence < self._next:
            raise Refused(f"call {call.call_id} has sequence {call.sequence}, but {self._next} is next")
        timing = common_pb2.Timing(arrived_unix_s=time.time())
        stuck_timeout_s = self.worker.table.stuck_timeout_s
        context = CallContext(call, time.monotonic() + timeout_s, stuck_timeout_s=stuck_timeout_s)
        known = Running(method, context, timing)
        if registration.instant and self._has_turn(call):
            response = self._answer(known, request)
        else:
            response = asyncio.create_task(_without_frames(self._run(known, registration, request)))
            self._calls[call.call_id] = known
            response.add_done_callback(partial(self._end, call.call_id))
        self._names[call.call_id] = method.path, call.session
        self._remember(call.call_id, response)
        return response

    def _end(self, call_id: str, response: asyncio.Future[Any]) -> None:
        del self._calls[call_id]
        if not response.cancelled():
            response.exception()  # now it is seen: a caller that gave up leaves nobody to look at it

    def _remember(self, call_id: str, response: asyncio.Future[Any]) -> None:
        self._responses[call_id] = response
        response.add_done_callback(self._forget_old)

    def _forget_old(self, ended: asyncio.Future[Any]) -> None:
        """Forgets the oldest responses where they are too many or too large; never one that is to come or just came."""
        self._remembered_bytes += _response_bytes(ended)
        while len(self._responses) > REMEMBERED_CALLS or self._remembered_bytes > REMEMBERED_BYTES:
            oldest = next(iter(self._responses.values()))
            if oldest is ended or not oldest.done():
                break
            self._remembered_bytes -= _response_bytes(oldest)
            call_id, _ = self._responses.popitem(last=False)
            del self._names[call_id]

    def _open_session(self, call: common_pb2.Call) -> None:
        self.session.open(call)
        self._next = 1
        self._abandoned.clear()
        self._wake()

    def _has_turn(self, call: common_pb2.Call) -> bool:
        return not self._busy and call.sequence in (0, self._next)

    def _check_endpoints(self, method: Method, request: Any) -> None:
        """Raises InvalidRequest where a batch names endpoints that its session has not introduced. Such a call is over
        before its turn, and no later one waits for it."""
        if not method.takes_rows or not request.HasField("batch"):
            return
        try:
            self._introductions.check(request.call.session, request.batch.endpoints)
        except InvalidRequest:
            if request.call.sequence >= self._next:
                self._abandon(request.call)
            raise

    def _answer(self, known: Running, request: Any) -> asyncio.Future[Any]:
        """An instant call whose turn it is needs no task, and is over before anyone could watch it."""
        response = asyncio.get_running_loop().create_future()
        try:
            response.set_result(self._respond(known, self._call(known, NO_ROWS, request)))
        except Exception as error:  # noqa: BLE001 - raised where the response is awaited
            response.set_exception(error)
        self._end_turn(known)
        return response

    async def _run(self, known: Running, registration: Registration, request: Any) -> Any:
        loop, context, timing = asyncio.get_running_loop(), known.context, known.timing
        started = time.monotonic()
        if known.method.takes_rows and request.HasField("batch"):
            known.fetch = loop.run_in_executor(self._transfer, self._fetch, request.batch, context, timing)
        await self._wait_for_turn(known)
        try:
            timing.queue_s = time.monotonic() - started
            if registration.instant:
                return self._respond(known, self._call(known, NO_ROWS, request))
            self._set_phase(worker_pb2.PHASE_FETCHING, known)
            rows, failure = await self._fetched(known)
            self._set_phase(worker_pb2.PHASE_COMPUTING, known)
            if registration.collective and self.worker.ranks.size > 1:
                await self._meet(known, request)
            work = loop.run_in_executor(
                self._compute, self._execute, known, registration, request, rows, failure
            )
            return await self._guard(work, known)
        except OutOfStep as error:
            loop.call_later(ANSWER_S, self._leave, str(error))
            raise
        finally:
            self._set_phase(worker_pb2.PHASE_DRAINING if self._draining else worker_pb2.PHASE_IDLE, None)
            self._end_turn(known)

    async def _wait_for_turn(self, known: Running) -> None:
        try:
            await self._queue_up(known)
        except BaseException:
            self._pass_turn()  # it may have been this call's
            raise

    async def _queue_up(self, known: Running) -> None:
        call, context = known.context.call, known.context
        while not self._has_turn(call):
            self.session.check(call)
            # Where there are peers, a cancelled call takes its turn, so that all ranks drop it at the same place.
            if context.cancelled and self.worker.ranks.size == 1:
                self._abandon(call)
                raise CallCancelled(f"call {call.call_id} was cancelled before it started")
            turn = asyncio.get_running_loop().create_future()
            self._waiting[turn] = call
            left_s = context.deadline - time.monotonic()
            try:
                await asyncio.wait_for(turn, max(min(left_s, MISSING_S), 0))
            except TimeoutError:
                if left_s > MISSING_S:
                    self._pass_over_missing()
                    continue
                self._abandon(call)
                running = self.running.method.name if self.running else f"call {self._next}, which never came"
                raise DeadlineExceeded(
                    f"{known.method.name} (sequence {call.sequence}) waited past its deadline behind {running}"
                ) from None
            finally:
                del self._waiting[turn]
        self.session.check(call)
        self._busy = True

    def _pass_over_missing(self) -> None:
        """Goes on with the earliest call that is here. One before it was lost on its way; peers that have it learn at
        its beginning that this rank is at a later one, and where it comes after all it is refused."""
        here = [call.sequence for call in self._waiting.values() if call.session == self.session.name]
        if here and not self._busy:
            self._next = max(self._next, min(here))
            self._pass_turn()

    def _abandon(self, call: common_pb2.Call) -> None:
        """The call will not take its turn: later ones do not wait for it."""
        if call.sequence and call.session == self.session.name:
            self._abandoned.add(call.sequence)
            self._skip_abandoned()

    def _skip_abandoned(self) -> None:
        while self._next in self._abandoned:
            self._abandoned.remove(self._next)
            self._next += 1
        self._pass_turn()

    def _end_turn(self, known: Running) -> None:
        self._busy = False
        call = known.context.call
        if call.sequence and call.session == self.session.name:
            # Another call may have been sent by this number, and refused, and those after it too.
            self._next = max(self._next, call.sequence + 1)
        elif call.sequence:
            # It outlived its session: nobody else would free the rows it made.
            self.store.release(call.session)
        self._skip_abandoned()

    def _pass_turn(self) -> None:
        """Wakes the call whose turn it is: one of many that wait, so that a long queue costs a turn no more than
        a short one."""
        for turn, call in self._waiting.items():
            if not turn.done() and self._has_turn(call):
                turn.set_result(None)
                return

    def _wake(self) -> None:
        """Wakes all that wait, to look whether they still may."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    async def _fetched(self, known: Running) -> tuple[CallRows, Exception | None]:
        """The rows, or why there are none: they could not be fetched, or nobody waits for them any more."""
        if known.fetch is None:
            return NO_ROWS, None
        waited, stopped = time.monotonic(), asyncio.ensure_future(known.stopped.wait())
        await asyncio.wait([known.fetch, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not known.fetch.done():
            return NO_ROWS, CallCancelled(f"call {known.context.call.call_id} was cancelled while it fetched")
        if error := known.fetch.exception():
            return NO_ROWS, error if isinstance(error, Exception) else RuntimeError(str(error))
        rows = known.fetch.result()
        known.timing.fetch_s = time.monotonic() - waited
        known.timing.fetched_bytes = rows.fetched.fetched_bytes
        return rows, None

    def _fetch(self, message: common_pb2.Batch, context: CallContext, timing: common_pb2.Timing) -> CallRows:
        batch = wire.from_proto(message)
        inline = (column.nbytes for column in batch.columns.values() if isinstance(column, LocalColumn))
        timing.inline_bytes = sum(inline)
        # What is left of the deadline is for the ranks to agree that it failed.
        deadline = context.deadline - min(ANSWER_S, (context.deadline - time.monotonic()) / 10)
        call = context.call
        relay_request = RelayRequest(
            call.call_id, Lease(call.session, call.step), wire.relays_from_proto(message)
        )
        before = self.fetcher.traffic()
        fetched = self.fetcher.fetch(batch, deadline, relay_request, writable=self.worker.writes_to_rows)
        rows = CallRows(fetched, wire.row_numbers(message))
        # One thread fetches, one call after the other: what was moved meanwhile was moved for this call.
        for name, moved in traffic_to_proto(traffic_since(self.fetcher.traffic(), before)).items():
            timing.traffic[name].CopyFrom(moved)
        return rows

    async def _meet(self, known: Running, request: Any) -> None:
        """Waits until every rank is at this call."""
        context, method = known.context, known.method
        if await self._meetings.meet(method, request, known.stopped, context.deadline):
            return
        self.session.check(context.call)
        if context.cancelled:
            raise CallCancelled(f"call {context.call.call_id} was cancelled before it started")
        raise DeadlineExceeded(
            f"{method.name} ({context.call.call_id}) did not start: not every rank was sent it before its deadline"
        )

    def _execute(
        self,
        known: Running,
        registration: Registration,
        request: Any,
        rows: CallRows,
        failure: Exception | None,
    ) -> Any:
        """On the compute thread."""
        started, context = time.monotonic(), known.context

        def run() -> CallResult:
            if failure is not None:
                raise failure
            if context.stopping:
                raise CallCancelled(f"call {context.call.call_id} was cancelled before it started")
            result = self.worker.around(lambda: self._call(known, rows, request))
            if not result.verified:
                rows.fetched.verify()
            return result

        meets_peers = registration.collective and self.worker.ranks.size > 1
        result = self._run_together(known, run) if meets_peers else run()
        known.timing.compute_s = time.monotonic() - started
        known.timing.peak_device_bytes = self.worker.peak_device_memory()
        return self._respond(known, result)

    def _run_together(self, known: Running, run: Callable[[], CallResult]) -> CallResult:
        """Runs a method that all ranks are in. It ends in an agreement, so that a failure fails the call on all.

        Before its first agreement a method meets no other rank, so there a rank that fails can wait for its peers.
        After that they may be in a collective that needs this rank, and so may never come: then it leaves.
        """
        ranks, context = self.worker.ranks, known.context
        first, failure, result = ranks.rounds, None, None
        try:
            result = run()
        except OutOfStep:
            raise
        except Exception as error:
            if is_known_to_all(error):
                raise
            failure = error
        met_peers = failure is not None and ranks.rounds > first
        try:
            ranks.agree(failure, time.monotonic() + ALONE_S if met_peers else context.peers_deadline)
        except OutOfStep:
            if failure is None:
                raise
            what = f"{type(failure).__name__}: {failure}"
            raise OutOfStep(f"rank {ranks.rank} failed alone in {known.method.name}: {what}") from failure
        assert result is not None, "a failure was raised"
        return result

    def _call(self, known: Running, rows: CallRows, request: Any) -> CallResult:
        return getattr(self.worker, known.method.snake_name)(rows, request, known.context)

    def _respond(self, known: Running, result: CallResult) -> Any:
        started, ranks = time.monotonic(), self.worker.ranks
        response = known.method.response(**result.fields)
        protocol = get_protocol(known.method.spec.transfer_protocol)  # type: ignore[union-attr]
        if result.columns and ranks.rank in protocol.collect(ranks.mesh):
            lease = Lease(known.context.call.session, known.context.call.step)
            columns = {name: self._put(values, lease) for name, values in result.columns.items()}
            batch = Batch(next(iter(columns.values())).rows, columns)
            response.batch.CopyFrom(wire.to_proto(batch))
            known.timing.stored_bytes = sum(c.nbytes for c in columns.values() if isinstance(c, RemoteColumn))
        known.timing.store_s = time.monotonic() - started
        response.outcome.timing.CopyFrom(known.timing)
        response.outcome.policy_version = self.worker.policy_version
        for name, (total, count) in result.metrics.items():
            response.outcome.metrics[name].sum, response.outcome.metrics[name].count = total, count
        return response

    def _put(self, values: Any, lease: Lease) -> RemoteColumn | LocalColumn:
        if isinstance(values, list):
            return LocalColumn(values)
        array = values.values if isinstance(values, Jagged) else values
        if isinstance(array, np.ndarray):
            return self.store.put_column(values, str(array.dtype), lease)
        from nccl_transfer.store.tensors import (
            to_numpy_carrier,  # needs torch, as only workers with tensors do
        )

        carrier, dtype = to_numpy_carrier(values)
        return self.store.put_column(carrier, dtype, lease)

    async def _guard(self, work: asyncio.Future[Any], known: Running) -> Any:
        """Waits for the compute thread. A call past its deadline is asked to stop. One that makes no progress after
        that is stuck, and no thread of ours can free it: the rank leaves, and its launcher may start a new epoch."""
        context = known.context
        done, _ = await asyncio.wait([work], timeout=max(context.deadline - time.monotonic(), 0))
        is_late = not done  # by the loop's timer, which may be early by a millisecond
        context.cancelled |= is_late
        while not done:
            since = max(context.deadline, context.progressed_at, self.worker.progressed_at)
            left = since + context.stuck_timeout_s - time.monotonic()
            if left <= 0:
                self._leave(
                    f"{known.method.name} ({context.call.call_id}) is stuck: past its deadline, and no progress "
                    f"for {context.stuck_timeout_s:g} s"
                )
            done, _ = await asyncio.wait([work], timeout=left)
        error = work.exception()
        # A rank that was asked to stop may hear it from a peer first.
        was_stopped = type(error) is PeerFailed and context.cancelled
        if was_stopped or isinstance(error, CallCancelled):
            self.session.check(context.call)
            if is_late or time.monotonic() > context.deadline:
                raise DeadlineExceeded(f"{known.method.name} ran past its deadline") from error
        if was_stopped:
            raise CallCancelled(f"call {context.call.call_id} was cancelled") from error
        return work.result()

    def _leave(self, why: str) -> NoReturn:
        ranks = self.worker.ranks
        print(f"fatal: {self.worker.role} rank {ranks.rank}: {why}; leaving", file=sys.stderr, flush=True)
        os._exit(70)

    def _set_phase(self, phase: worker_pb2.Phase, running: Running | None) -> None:
        self.phase, self.running = phase, running
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _response_bytes(ended: asyncio.Future[Any]) -> int:
    """Size of a response as it is serialized; an error counts nothing."""
    return 0 if ended.cancelled() or ended.exception() else ended.result().ByteSize()


def time_to_answer(remaining_s: float) -> float:
    """How long a call may take, of what its caller waits, so that the caller hears what was late."""
    remaining_s = min(remaining_s, LONGEST_S)
    return remaining_s - min(ANSWER_S, remaining_s / 10)


async def _without_frames(run: Awaitable[Any]) -> Any:
    """A failed call is remembered for retries, but not the rows in the frames that its error went through. They have
    to go before the task ends with it: the task keeps the traceback apart from the error."""
    try:
        return await run
    except Exception as error:
        drop_frames(error)
        raise
