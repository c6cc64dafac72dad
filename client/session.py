"""The session of a run and its steps: the header of calls, and the step on whose behalf each call is made."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from rlhf.errors import DeadlineExceeded, InvalidRequest
from rlhf.v1 import common_pb2

NEXT_START_NS = 1000
"""Smallest difference of two sessions' starts: ranks compare them in microseconds."""
MAX_UINT64 = 2**64 - 1
MOVE_A_MODEL = ("begin_session", "save_checkpoint", "load_checkpoint")
"""Methods that write or read a whole model, with a deadline of their own."""


class StepContext:
    """A step and its calls. The random numbers of a call depend on the step's number and on the call's ordinal in it,
    and rows are freed with their step, so several steps may be under way. Thread-safe.

    Args:
        number: From 1; 0 is before the first.

    Attributes:
        noted: Metrics counted while the step is under way, by name.
        has_ended: Whether its rows are freed and no more calls are made on its behalf.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_ended = False
        self.noted: dict[str, float] = {}
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._controller_bytes = 0
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()

    @property
    def controller_bytes(self) -> int:
        """Bytes of rows that passed through the controller on behalf of the step."""
        return self._controller_bytes

    def next_ordinal(self, service: str, method: str) -> int:
        """The number of earlier calls of a method in this step."""
        with self._lock:
            ordinal = self._ordinals[service, method]
            self._ordinals[service, method] += 1
        return ordinal

    def count_bytes(self, nbytes: int) -> None:
        """Adds to `controller_bytes`."""
        with self._lock:
            self._controller_bytes += nbytes

    def note(self, name: str, count: float) -> None:
        """Adds to a metric of the step."""
        with self._lock:
            self.noted[name] = self.noted.get(name, 0.0) + count

    def made(self, call: Future[Any]) -> None:
        """Records a call made on behalf of the step."""
        with self._lock:
            self._calls.add(call)
        call.add_done_callback(self._forget)

    def wait(self, timeout_s: float) -> None:
        """Waits until no call of the step is under way. Errors of the calls are raised where their results are used.

        Raises:
            DeadlineExceeded: A call is under way after `timeout_s` seconds.
        """
        with self._lock:
            calls = list(self._calls)
        pending = wait(calls, timeout_s).not_done
        if pending:
            raise DeadlineExceeded(
                f"step {self.number}: {len(pending)} calls are under way after {timeout_s:g} s"
            )

    def _forget(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(call)


@dataclass
class Session:
    """The session of a run on its services.

    Attributes:
        name: Unique name; services keep rows by session.
        started_unix_ns: Start of the run, Unix time in nanoseconds.
        claimed_unix_ns: The start in the header of calls, by which services know the younger of two sessions:
            `started_unix_ns`, or later where a service knows a younger session.
        seed: Seed of the run.
        timeout_s: Deadline of a call, in seconds.
        save_timeout_s: Deadline of a call that writes or reads a whole model, in seconds.
        balance: Whether sequences are dealt to ranks by cost instead of by count.
        take_over: Whether the session may end another one that has the services.
        newest: The step begun last, which calls without a step belong to.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_unix_ns: int = field(default_factory=time.time_ns)
    seed: int = 0
    timeout_s: float = 600.0
    save_timeout_s: float = 3600.0
    balance: bool = True
    take_over: bool = False
    newest: StepContext = field(default_factory=lambda: StepContext(0))
    _call_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.claimed_unix_ns = self.started_unix_ns

    def claim_after(self, known: Iterable[int]) -> None:
        """Claims a start after the youngest one that services know [Unix ns], since clocks may differ."""
        youngest = max(known, default=0)
        if youngest >= self.claimed_unix_ns:
            self.claimed_unix_ns = min(youngest + NEXT_START_NS, MAX_UINT64)

    def time_of(self, method: str) -> float:
        """Deadline of a call of a method, by its Python name, in seconds."""
        return self.save_timeout_s if method in MOVE_A_MODEL else self.timeout_s

    def begin_step(self, number: int) -> StepContext:
        """Begins a step; earlier steps may be under way.

        Raises:
            InvalidRequest: A step of this or a later number has begun.
        """
        if number <= self.newest.number:
            raise InvalidRequest(f"step {number} cannot begin: step {self.newest.number} has begun")
        self.newest = StepContext(number)
        return self.newest

    def step_of(self, step: StepContext | None) -> StepContext:
        """The step on whose behalf calls on rows of `step` are made: the newest one where `step` is None or has
        ended."""
        return self.newest if step is None or step.has_ended else step

    def header(self, step: StepContext, service: str, method: str) -> common_pb2.Call:
        """The header of a step's next call of a method, without sequence and epoch."""
        return common_pb2.Call(
            call_id=f"{self.name}_{next(self._call_numbers)}",
            session=self.name,
            session_started_unix_ns=self.claimed_unix_ns,
            take_over=self.take_over,
            seed=self.seed,
            step=step.number,
            ordinal=step.next_ordinal(service, method),
        )
