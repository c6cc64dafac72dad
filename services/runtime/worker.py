"""The base class of every role: methods registered with their transfer protocol, run one at a time in call order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from nccl_transfer.rows import FetchedRows, Values
from rlhf.contract import Method, group_methods
from rlhf.errors import CallCancelled, DeadlineExceeded, InvalidRequest
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.ranks import Ranks
from settings.service import ServiceTable

F = TypeVar("F", bound=Callable[..., Any])

MAX_SHOWN = 300
"""Characters of a value in an error message."""

PATIENCE = 0.8
"""Share of `stuck_timeout_s` after which a rank gives up waiting for its peers, so that it can report this before it
counts as stuck itself."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Declarations that `@register` attaches to a method.

    Attributes:
        protocol: Name of its transfer protocol; must be the one its proto declares.
        collective: Whether ranks meet in collectives while it runs. If so, no rank starts before all are at the call,
            and its first collective, if it has any, is an agreement (`Ranks.agree`, `together` or `total`). It changes
            no state before that, so a rank that fails earlier can tell its peers there.
        instant: Whether it returns at once, so that the event loop runs it without a thread.
    """

    protocol: str
    collective: bool
    instant: bool


def register(protocol: str, *, collective: bool = True, instant: bool = False) -> Callable[[F], F]:
    """Makes a method of a worker callable by the controller under a transfer protocol (paper, section 4.1)."""

    def note(function: F) -> F:
        function.registration = Registration(protocol, collective, instant)  # type: ignore[attr-defined]
        return function

    return note


@dataclass(frozen=True)
class CallRows:
    """The rows of a call on this rank.

    Attributes:
        fetched: Values by column: numpy arrays [rows, ...], `Jagged` numpy arrays, or lists of strings.
        numbers: Numbers of the rows in the whole batch of the call, [rows] int64.
    """

    fetched: FetchedRows
    numbers: np.ndarray

    def __getitem__(self, name: str) -> Values:
        if name not in self.fetched.values:
            raise InvalidRequest(f"column {name!r} is missing; given: {sorted(self.fetched.values)}")
        return self.fetched.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fetched.values

    def texts(self, name: str) -> list[str]:
        """A text column."""
        values = self[name]
        if not isinstance(values, list):
            raise InvalidRequest(f"column {name!r} is not text")
        return values

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.fetched.rows


NO_ROWS = CallRows(FetchedRows(0, {}, {}, 0), np.empty(0, np.int64))


@dataclass
class CallContext:
    """A running call, as its method sees it.

    Attributes:
        call: Header of the call.
        deadline: Latest end of the call, by `time.monotonic()`.
        cancelled: Whether the call should stop.
        done, done_of: Progress, for Watch.
        stuck_timeout_s: How long after its deadline the call may be without progress.
        progressed_at: `time.monotonic()` of the newest progress.
    """

    call: common_pb2.Call
    deadline: float
    cancelled: bool = False
    done: int = 0
    done_of: int = 0
    stuck_timeout_s: float = 60.0
    progressed_at: float = 0.0

    @property
    def peers_deadline(self) -> float:
        """Latest time to wait for the other ranks of the call, which may end some time after the deadline."""
        return max(self.deadline, time.monotonic()) + PATIENCE * self.stuck_timeout_s

    @property
    def stopping(self) -> bool:
        return self.cancelled or time.monotonic() > self.deadline

    def check(self) -> None:
        """Raises CallCancelled or DeadlineExceeded where the call should stop; to be called between pieces of work."""
        if self.cancelled:
            raise CallCancelled(f"call {self.call.call_id} was cancelled")
        if time.monotonic() > self.deadline:
            raise DeadlineExceeded(f"call {self.call.call_id} ran past its deadline")

    def progress(self, done: int, of: int) -> None:
        self.done, self.done_of, self.progressed_at = done, of, time.monotonic()


@dataclass(frozen=True)
class CallResult:
    """Return value of a method.

    Attributes:
        columns: Output rows by column: numpy arrays, `Jagged`, torch tensors; lists of strings travel inline.
        metrics: (sum, count) by name; over ranks, sums and counts are added.
        fields: Further fields of the response message.
        verified: Whether the method has verified its rows, as one that changes weights does before they count.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False


class Worker:
    """One rank of a service. A role adds the methods of its proto; this base class has those of WorkerService, for
    roles without weights.
    """

    role: ClassVar[str]
    also_serves: ClassVar[tuple[str, ...]] = ()
    """Further roles whose methods its ranks run, in the same order of calls."""
    writes_to_rows: ClassVar[bool] = False
    """Whether methods may write to arrays that come from other ranks (see `Fetcher.fetch`); arrays that travel in the
    message itself are read-only in any case."""

    def __init__(self, table: ServiceTable, ranks: Ranks) -> None:
        self.table = self.config_table = table
        self.ranks = ranks
        self.policy_version = 0
        self.output_roots: tuple[Path, ...] = ()
        """Directories, symbolic links resolved, below which the rank may write."""
        self.progressed_at = 0.0
        """`time.monotonic()` of the running method's newest progress."""

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        """Whether this service computes with torch, and so needs a process group."""
        return False

    def prepare_thread(self) -> None:
        """Called once on the compute thread."""

    def close(self) -> None:
        """Ends processes and threads that the role has started. Called on the compute thread after the server has
        drained."""

    def device(self) -> dict[str, str]:
        """`device` and `device_uuid` of RankInfo."""
        return {"device": "cpu", "device_uuid": ""}

    def device_memory(self) -> int:
        """Bytes allocated on the device; 0 on CPU."""
        return 0

    def peak_device_memory(self) -> int:
        """Peak of bytes allocated on the device during the last method; 0 on CPU."""
        return 0

    def describe(self) -> worker_pb2.DescribeResponse:
        """Fields of Describe that this role fills in; the server adds ranks, methods and epoch."""
        return worker_pb2.DescribeResponse(limits=["there are no weights to offload, save or load"])

    @register("ONE_TO_ALL", collective=False, instant=True)
    def synchronize(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult()

    @register("ONE_TO_ALL", collective=False)
    def begin_session(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        if request.directories:
            raise InvalidRequest(f"{self.role} has no weights to save")
        return CallResult()

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult(fields={"moved_bytes": 0})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult(fields={"moved_bytes": 0})

    @register("ONE_TO_ALL", collective=False)
    def profile(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        raise InvalidRequest(f"{self.role} computes without torch, so there is nothing to profile")

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        raise InvalidRequest(f"{self.role} has no weights to save")

    @register("ONE_TO_ALL")
    def load_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        raise InvalidRequest(f"{self.role} has no weights to load")

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        """Runs a method; a role may wrap it, for example in a profiler."""
        return run()

    def leave(self, why: str) -> NoReturn:
        """Ends this process at once and prints the reason: for a rank that is stuck or out of step with its peers."""
        print(f"fatal: {self.role} rank {self.ranks.rank}: {why}; leaving", file=sys.stderr, flush=True)
        os._exit(70)

    def progressed(self) -> None:
        """Notes progress of the running method: a call past its deadline may go on as long as it makes some."""
        self.progressed_at = time.monotonic()

    def output_path(self, directory: str) -> Path:
        """A directory that a request names, with its symbolic links resolved.

        Raises:
            InvalidRequest: It is not below one of `output_roots`.
        """
        try:
            path = Path(directory).resolve()
            path.exists()  # raises for a path that is too long
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidRequest(f"directory: {directory[:MAX_SHOWN]!r} is no path: {why}") from error
        if not any(root in path.parents for root in self.output_roots):
            allowed = ", ".join(map(str, self.output_roots)) or "there are none"
            raise InvalidRequest(
                f"directory: {path} is not below one of the directories that this service may write to; its "
                f"output_roots: {allowed}"
            )
        return path


def require(request: Any, *names: str) -> None:
    """Raises InvalidRequest where one of these fields, which the proto requires, is not set."""
    given = {field.name for field, _ in request.ListFields()}
    missing = [name for name in names if name not in given]
    if missing:
        raise InvalidRequest(f"{' and '.join(missing)} must be given")


def registered_methods(worker: type[Worker]) -> dict[str, tuple[Method, Registration]]:
    """The group methods of the roles that a worker serves, by Python name.

    Raises:
        TypeError: The worker lacks a method of its proto, or registers it with another transfer protocol.
    """
    found = {}
    roles = (worker.role, *worker.also_serves)
    methods = {name: method for role in roles for name, method in group_methods(role).items()}
    for name, method in methods.items():
        registration = getattr(getattr(worker, name, None), "registration", None)
        if registration is None:
            raise TypeError(f"{worker.__name__} has no registered method {name} for {method.path}")
        declared = method.spec.transfer_protocol  # type: ignore[union-attr]
        if registration.protocol != declared:
            raise TypeError(
                f"{worker.__name__}.{name} is registered with {registration.protocol}, "
                f"but {method.path} declares {declared}"
            )
        found[name] = (method, registration)
    return found
