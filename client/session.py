"""The session of a run, and its steps: what calls have in common, and on whose behalf each is made."""

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
"""Least distance of two sessions' starts: ranks compare them in microseconds."""
MAX_UINT64 = 2**64 - 1
MOVE_A_MODEL = ("begin_session", "save_checkpoint", "load_checkpoint")
"""Methods that write or read a whole model, and so have a time of their own."""


class StepContext:
    """A step as its calls see it. Their randomness depends on its number and on their place in it, and the rows they
    make are freed with it, so several steps may be under way. Safe from any thread.

    Args:
        number: From 1; 0 is before the first.

    Attributes:
        noted: Metrics that are counted while the step is under way, by name.
        has_ended: Whether its rows were freed for good.
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
        """How many calls of a method the step has made before this one."""
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
        """A call that was made on behalf of the step."""
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
    """One run, as the services know it.

    Attributes:
        name: Unique name of the run, by which services keep its rows and tell others that it is there.
        started_unix_ns: When the run started, Unix time in nanoseconds; it never changes.
        claimed_unix_ns: The start that calls tell, by which services know the younger of two sessions:
            `started_unix_ns`, or later where a service knows a younger session.
        seed: Seed of the run.
        timeout_s: Longest time of a call.
        save_timeout_s: The same of one that writes or reads a whole model.
        balance: Whether sequences are dealt out to ranks by cost, and not by count.
        take_over: Whether it may end the run that has the services.
        newest: The step that was begun last, to which calls belong that are made on behalf of none.
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
        """Claims a start after the youngest that services know of [Unix ns]: clocks need not agree."""
        youngest = max(known, default=0)
        if youngest >= self.claimed_unix_ns:
            self.claimed_unix_ns = min(youngest + NEXT_START_NS, MAX_UINT64)

    def time_of(self, method: str) -> float:
        """Longest time of a call of a method, by its Python name, in seconds."""
        return self.save_timeout_s if method in MOVE_A_MODEL else self.timeout_s

    def begin_step(self, number: int) -> StepContext:
        """Begins a step; those that were begun before may go on beside it.

        Raises:
            InvalidRequest: A step of this or a later number was begun before.
        """
        if number <= self.newest.number:
            raise InvalidRequest(f"step {number} cannot begin: step {self.newest.number} has begun")
        self.newest = StepContext(number)
        return self.newest

    def step_of(self, step: StepContext | None) -> StepContext:
        """The step on whose behalf calls are made on rows of `step`: the newest, where these are of none, or of one
        that has ended."""
        return self.newest if step is None or step.has_ended else step

    def header(self, step: StepContext, service: str, method: str) -> common_pb2.Call:
        """The header of a step's next call of a method, all but sequence and epoch."""
        return common_pb2.Call(
            call_id=f"{self.name}_{next(self._call_numbers)}",
            session=self.name,
            session_started_unix_ns=self.claimed_unix_ns,
            take_over=self.take_over,
            seed=self.seed,
            step=step.number,
            ordinal=step.next_ordinal(service, method),
        )
