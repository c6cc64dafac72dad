"""The compute thread of one rank, which runs methods one at a time and makes a call that fails on one rank fail on
all ranks; and a second thread for the calls that run concurrently with ordered calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf.errors import CallCancelled, DeadlineExceeded, OutOfStep, PeerFailed
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.calls import ActiveCall
from services.runtime.encoding import ResponseEncoder
from services.runtime.phases import RankPhase
from services.runtime.ranks import ALONE_S, is_known_to_all
from services.runtime.worker import NO_ROWS, CallResult, CallRows, Worker


class ComputeThread:
    """Runs methods of the worker on a separate thread, one at a time, and methods that run concurrently with ordered
    calls on a second thread.

    Args:
        worker: Worker whose methods are run.
        encoder: Builds response messages.
        phase: Phase of the rank, which is updated.
        check_session: Raises Refused if a call's session has ended.
    """

    def __init__(
        self,
        worker: Worker,
        encoder: ResponseEncoder,
        phase: RankPhase,
        check_session: Callable[[common_pb2.Call], None],
    ) -> None:
        self._worker = worker
        self._encoder = encoder
        self._phase = phase
        self._check_session = check_session
        self._thread = ThreadPoolExecutor(1, "compute", initializer=worker.prepare_thread)
        self._beside = ThreadPoolExecutor(1, "beside", initializer=worker.prepare_thread)

    def run_at_once(self, call: ActiveCall) -> Any:
        """Runs an instant method, which takes no rows, on the calling thread; returns its response message or raises
        its error."""
        return self._encode(call, self._call_method(call, NO_ROWS))

    async def run(self, call: ActiveCall, rows: CallRows, failure: Exception | None) -> Any:
        """Runs the method of a call on its thread; returns its response message.

        Args:
            call: The call. It is its turn, unless the call runs concurrently with ordered calls.
            rows: Rows of the call.
            failure: Error to raise instead of running the method, such as that of the fetch, so that the other ranks
                learn of it; None to run the method.

        Raises:
            DeadlineExceeded: The call was stopped at its deadline.
            CallCancelled: The call was stopped before its deadline.
            Refused: The call was stopped because its session has ended.
            Exception: The error of the method, or `failure`.
        """
        loop = asyncio.get_running_loop()

        def storing() -> None:
            loop.call_soon_threadsafe(self._phase.set, worker_pb2.PHASE_STORING, call)

        thread = self._beside if call.beside else self._thread
        work = loop.run_in_executor(thread, self._execute, call, rows, failure, storing)
        await self._wait(work, call)
        error, context = work.exception(), call.context
        # A rank that was asked to stop may learn it from a peer first.
        was_stopped = type(error) is PeerFailed and (context.cancelled or context.is_late)
        if was_stopped or isinstance(error, CallCancelled):
            self._check_session(context.call)
            if context.is_late or time.monotonic() > context.deadline:
                raise DeadlineExceeded(f"{call.method.name} ran past its deadline") from error
        if was_stopped:
            raise CallCancelled(f"call {call.call_id} was cancelled") from error
        return work.result()

    async def close(self, within_s: float) -> None:
        """Closes the worker on the compute thread and ends both threads; waits at most `within_s` seconds for that."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._worker.close)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, within_s)
        for thread in (self._thread, self._beside):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, work: asyncio.Future[Any], call: ActiveCall) -> None:
        """Waits until the compute thread has run a call. At the call's deadline, asks it to stop. If it then makes no
        progress for `stuck_timeout_s`, it is stuck, which nothing in this process can end: the process exits, and its
        launcher (rlhf-deploy or torchrun) may restart the service."""
        context = call.context
        done, _ = await asyncio.wait([work], timeout=max(context.deadline - time.monotonic(), 0))
        context.is_late = not done  # by the loop's timer, which may be early by a millisecond
        while not done:
            since = max(context.deadline, context.progressed_at, self._worker.progressed_at)
            left = since + context.stuck_timeout_s - time.monotonic()
            if left <= 0:
                self._worker.leave(
                    f"{call.method.name} ({call.call_id}) is stuck: past its deadline, and no progress for "
                    f"{context.stuck_timeout_s:g} s"
                )
            done, _ = await asyncio.wait([work], timeout=left)

    def _execute(
        self, call: ActiveCall, rows: CallRows, failure: Exception | None, storing: Callable[[], object]
    ) -> Any:
        """Runs a call on its thread, where it is called; returns its response message.

        Args:
            failure: Error to raise instead of running the method; None to run it.
            storing: Called before the rows of the response are stored.
        """
        started, context = time.monotonic(), call.context

        def run() -> CallResult:
            if failure is not None:
                raise failure
            if context.stopping:
                raise CallCancelled(f"call {call.call_id} was cancelled before it started")
            if call.beside:
                return self._call_method(call, rows)
            result = self._worker.around(lambda: self._call_method(call, rows))
            if not result.verified:
                rows.fetched.verify()
            return result

        meets_peers = call.registration.collective and self._worker.ranks.size > 1
        result = self._run_together(call, run) if meets_peers else run()
        call.timing.compute_s = time.monotonic() - started
        call.timing.peak_device_bytes = self._worker.peak_device_memory()
        if self._encoder.stores(call.method, result):
            storing()
        return self._encode(call, result)

    def _run_together(self, call: ActiveCall, run: Callable[[], CallResult]) -> CallResult:
        """Runs a method that all ranks run, and then agrees with them, so that a failure on one fails the call on
        all.

        A method runs no other collective before its first agreement, so a rank that fails before it can wait for its
        peers. Later, the peers may be blocked in a collective that needs this rank and never reach the agreement: if
        they do not reach it within ALONE_S, this raises OutOfStep, and the process exits.
        """
        ranks = self._worker.ranks
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
        until = time.monotonic() + ALONE_S if met_peers else call.context.peers_deadline
        try:
            ranks.agree(failure, until)
        except OutOfStep as lost:
            if failure is None:
                raise
            why = f"{call.method.name}: {type(failure).__name__}: {failure}"
            if until - time.monotonic() > 0.1:
                # A peer has died, and the failure may be that of a collective with it.
                raise OutOfStep(f"{lost}; rank {ranks.rank} failed in {why}") from failure
            raise OutOfStep(f"rank {ranks.rank} failed alone in {why}") from failure
        assert result is not None, "a failure was raised"
        return result

    def _call_method(self, call: ActiveCall, rows: CallRows) -> CallResult:
        """Calls the worker's method and returns its result on this rank. Raises RuntimeError where it raises
        CancelledError, which would cancel the task that waits for the call, or SystemExit, which would end the event
        loop: either would leave the call without an answer."""
        try:
            return getattr(self._worker, call.method.snake_name)(rows, call.request, call.context)
        except (asyncio.CancelledError, SystemExit) as error:
            raise RuntimeError(f"{call.method.name} raised {type(error).__name__}") from error

    def _encode(self, call: ActiveCall, result: CallResult) -> Any:
        """Stores the rows of a result and returns the response message."""
        return self._encoder.encode(call.method, call.context.call, call.timing, result)
