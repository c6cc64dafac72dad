"""The session of a run and its steps: they make the headers of calls, and count the calls of each step."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from client.gate import Gate, Patience
from client.unread import UnreadErrors
from client.waiting import settle
from rlhf.errors import DeadlineExceeded, InvalidRequest
from rlhf.v1 import common_pb2

NEXT_START_NS = 1000
"""Smallest difference between the start times of two sessions, in nanoseconds, since ranks compare start times in
microseconds."""
MAX_UINT64 = 2**64 - 1
AFTER_UPDATES = MAX_UINT64
"""Lateness of calls to trained services, above that of any segment; see `StepContext.gate_of`."""
MOVE_A_MODEL = (
    "begin_session",
    "save_checkpoint",
    "load_checkpoint",
    "verify_weights",
    "send_weights",
    "load_weights",
    "commit_weights",
)
"""Python names of the methods that write, read or move a whole model; their timeout is `Session.save_timeout_s`."""

_of_thread = threading.local()
_MONOTONIC_BEGAN_S = time.time() - time.monotonic()


def steady_unix_s() -> float:
    """Returns the Unix time in seconds, counted by the monotonic clock since this module was imported: differences are
    durations, also where the host's clock is corrected meanwhile."""
    return _MONOTONIC_BEGAN_S + time.monotonic()


def works_for_a_step() -> bool:
    """Returns whether the calling thread works for one step; see `StepContext.on_thread`."""
    return getattr(_of_thread, "step", None) is not None


class StepContext:
    """A training step and the calls made in it. The random numbers of a call depend on the number of the step and on
    the ordinal of the call in it, and rows are freed with their step, so several steps may be under way. Thread-safe.

    Args:
        number: Number of the step, from 1; 0 stands for calls before the first step.
        gate: Holds back the step's calls to services that learn until a later step has generated. Default: no call is
            held back.
        segment_gates: One gate for each segment of the responses after the first, in order. It holds back the call that
            generates the segment, and calls that need it, until a later step has generated (`rollout.segments`).
            Default: no call is held back.

    Attributes:
        noted: Metrics of the step by name, accumulated with `note`.
        has_ended: Whether the rows of the step were freed, after which no more calls are made in it.
        num_changes: Number of its calls that were made, and of those that have ended.
    """

    def __init__(self, number: int, gate: Gate | None = None, segment_gates: Sequence[Gate] = ()) -> None:
        self.number = number
        self.gate = gate
        self.segment_gates = segment_gates
        self.has_ended = False
        self.num_changes = 0
        self.noted: dict[str, float] = {}
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._controller_bytes = 0
        self._calls: set[Future[Any]] = set()
        self._unread = UnreadErrors()
        self._lock = threading.Lock()

    @property
    def controller_bytes(self) -> int:
        """Bytes of row data that passed through the controller in this step."""
        return self._controller_bytes

    def gate_of(self, lateness: int) -> Gate | None:
        """Returns the gate that holds back a call of this lateness; None if there is no such gate.

        Args:
            lateness: 0 for a call that is not held back; n for a call that generates segment n, counted from 0, or
                needs it; `AFTER_UPDATES` for a call to a service that learns, or a call that needs its result.
        """
        if 0 < lateness <= len(self.segment_gates):
            return self.segment_gates[lateness - 1]
        return self.gate if lateness == AFTER_UPDATES else None

    def reached(self, lateness: int) -> Patience | None:
        """Notifies the gates before the algorithm waits for a result of this lateness; see `gate_of`. Returns how long
        to wait; None: no limit, as for a result that is not held back."""
        found = [gate.reached(needs_kept=True) for gate in self.segment_gates[:lateness]]
        if self.gate:
            found.append(self.gate.reached(needs_kept=lateness == AFTER_UPDATES))
        return next((each for each in found if each), None)

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        """Context manager in which calls of this thread that name no step belong to this one instead of the one begun
        last, which depends on times where the thread works beside the loop over the steps."""
        before = getattr(_of_thread, "step", None)
        _of_thread.step = self
        try:
            yield
        finally:
            _of_thread.step = before

    def next_ordinal(self, service: str, method: str) -> int:
        """Returns the ordinal of the next call of a method of a service in this step, from 0, and counts the call."""
        with self._lock:
            ordinal = self._ordinals[service, method]
            self._ordinals[service, method] += 1
        return ordinal

    def count_bytes(self, nbytes: int) -> None:
        """Adds `nbytes` to `controller_bytes`."""
        with self._lock:
            self._controller_bytes += nbytes

    def note(self, name: str, count: float) -> None:
        """Adds `count` to the metric `name` in `noted`."""
        with self._lock:
            self.noted[name] = self.noted.get(name, 0.0) + count

    def made(self, call: Future[Any], name: str = "") -> None:
        """Records a call made in this step by its future, so that `wait` waits for it; forgets it when it is done.
        `name`: SERVICE.METHOD of a call that makes no columns, whose error `raise_unread` raises. Default: its error is
        raised where its columns are read."""
        with self._lock:
            self._calls.add(call)
            self.num_changes += 1
        if name:
            self._unread.watch(call, name)
        call.add_done_callback(self._forget)

    def raise_unread(self) -> None:
        """Raises the first unread error of the calls without columns that have failed so far. An error is read once a
        wait for the call, or for columns that depend on it, has raised it; errors of cancelled calls are ignored. The
        message names step, service and method. Discards further unread errors."""
        self._unread.raise_first(f"step {self.number}")

    def wait(self, timeout_s: float) -> None:
        """Blocks until the calls that `made` has recorded so far are done. Does not raise the errors of the calls; see
        `raise_unread`.

        Raises:
            DeadlineExceeded: A call is still under way after `timeout_s` seconds.
        """
        with self._lock:
            calls = list(self._calls)
        settle(calls)
        pending = wait(calls, timeout_s).not_done
        if pending:
            waiting = "1 call is" if len(pending) == 1 else f"{len(pending)} calls are"
            raise DeadlineExceeded(f"step {self.number}: {waiting} under way after {timeout_s:g} s")

    def _forget(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(call)
            self.num_changes += 1


@dataclass
class Session:
    """The session of a run: one controller's use of its services, from connecting to them until the run ends.

    Attributes:
        name: Unique name of the session, by default a random UUID; services keep rows by session.
        started_unix_ns: Start of the run, Unix time in nanoseconds. Default: now.
        claimed_unix_ns: Start time in the header of calls, by which services tell the newer of two sessions:
            `started_unix_ns`, or later after `claim_after`.
        seed: Seed of the run.
        timeout_s: Timeout of a call, in seconds.
        save_timeout_s: Timeout of a call that writes or reads a whole model, in seconds.
        balance: Whether sequences are distributed over data ranks by their estimated cost instead of by count.
        take_over: Whether the session may end another session that holds the services.
        newest: The step begun last; calls that name no step belong to it, see `step_of`.
        now: Function that returns the time of the run, Unix time in seconds. Default: `steady_unix_s`.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_unix_ns: int = field(default_factory=time.time_ns)
    seed: int = 0
    timeout_s: float = 600.0
    save_timeout_s: float = 3600.0
    balance: bool = True
    take_over: bool = False
    newest: StepContext = field(default_factory=lambda: StepContext(0))
    now: Callable[[], float] = steady_unix_s
    _call_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.claimed_unix_ns = self.started_unix_ns

    def claim_after(self, known: Iterable[int]) -> None:
        """Makes `claimed_unix_ns` later than all of `known` if it is not, since the clocks of hosts may differ.

        Args:
            known: Start times of the sessions that services know, Unix time in nanoseconds.
        """
        youngest = max(known, default=0)
        if youngest >= self.claimed_unix_ns:
            self.claimed_unix_ns = min(youngest + NEXT_START_NS, MAX_UINT64)

    def time_of(self, method: str) -> float:
        """Returns the timeout of calls of a method, in seconds: `save_timeout_s` for those in MOVE_A_MODEL, else
        `timeout_s`. `method` is its Python name, such as save_checkpoint."""
        return self.save_timeout_s if method in MOVE_A_MODEL else self.timeout_s

    def begin_step(
        self, number: int, gate: Gate | None = None, segment_gates: Sequence[Gate] = ()
    ) -> StepContext:
        """Begins a step and returns it. Earlier steps may still be under way. Arguments as those of `StepContext`.

        Raises:
            InvalidRequest: A step with this or a higher number has begun already.
        """
        if number <= self.newest.number:
            raise InvalidRequest(f"step {number} cannot begin: step {self.newest.number} has begun")
        self.newest = StepContext(number, gate, segment_gates)
        return self.newest

    def step_of(self, step: StepContext | None) -> StepContext:
        """Returns the step that calls on rows of `step` belong to: `step` itself, or where `step` is None or has ended
        that of the thread (`StepContext.on_thread`), or `newest` where the thread has none."""
        steps = (step, getattr(_of_thread, "step", None))
        return next((each for each in steps if each and not each.has_ended), self.newest)

    def new_call_id(self) -> str:
        """Returns a call id that no call has had."""
        return f"{self.name}_{next(self._call_numbers)}"

    def header(self, step: StepContext, service: str, method: str) -> common_pb2.Call:
        """Returns the header of the next call of a service's method in a step, with a new call id and the step's next
        ordinal. Its sequence number and epoch are set by `FanOut.address`, which may also make its start later."""
        return self.headers(step, service, method, 1)[0]

    def headers(
        self, step: StepContext, service: str, method: str, chunks: int, prepared_by: int = 0
    ) -> list[common_pb2.Call]:
        """Returns the headers of the calls that together are the next call of a service's method in a step, one for
        each of `chunks` chunks of its rows: as `header`, with call ids of their own and the same ordinal. Before them
        are those of `prepared_by` calls for further chunks, which prepare it."""
        ordinal = step.next_ordinal(service, method)
        places = [(chunk, of) for of in (prepared_by, chunks) for chunk in range(of)]
        return [
            common_pb2.Call(
                call_id=self.new_call_id(),
                session=self.name,
                session_started_unix_ns=self.claimed_unix_ns,
                take_over=self.take_over,
                seed=self.seed,
                step=step.number,
                ordinal=ordinal,
                chunk=chunk,
                chunks=of if of > 1 else 0,
            )
            for chunk, of in places
        ]
