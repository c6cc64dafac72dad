"""Base class of the workers of all roles, whose methods are registered with a transfer protocol and run one at a time
in the order of calls."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.fetch import Fetcher
from nccl_transfer.rows import FetchedRows, Values
from rlhf.contract import Method, group_methods
from rlhf.errors import CallCancelled, ConfigError, DeadlineExceeded, InvalidRequest, Refused
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.ranks import Ranks
from services.storage.written import WrittenFile, written_below
from settings.service import ServiceTable

F = TypeVar("F", bound=Callable[..., Any])

MAX_SHOWN = 300
"""Most characters of a request's value that an error message repeats."""

PATIENCE = 0.8
"""Fraction of `stuck_timeout_s` after which a rank gives up waiting for its peers, so that it can report this before it
counts as stuck itself."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Properties of a worker's method, which `@register` attaches to it.

    Attributes:
        protocol: Name of the method's transfer protocol, such as "3D_PROTO"; must be the one that its proto declares.
        collective: Whether ranks meet in collectives while the method runs. If so, no rank starts it before all ranks
            are ready to. Its first collective, if it has any, must be an agreement (`Ranks.agree`, `together` or
            `total`), and it must change no state before that, so that a rank that fails earlier can tell its peers.
        instant: Whether the method is so short that it runs on the event loop's thread, when its turn comes.
    """

    protocol: str
    collective: bool
    instant: bool


def register(protocol: str, *, collective: bool = True, instant: bool = False) -> Callable[[F], F]:
    """Decorator that attaches a `Registration` to a method of a worker, which the controller may then call by RPC
    (HybridFlow paper, section 4.1). The method itself stays as it is.

    Args:
        protocol, collective, instant: As in `Registration`.
    """

    def note(function: F) -> F:
        function.registration = Registration(protocol, collective, instant)  # type: ignore[attr-defined]
        return function

    return note


@dataclass(frozen=True)
class CallRows:
    """The rows of a call on this rank.

    Attributes:
        fetched: The fetched rows; `fetched.values` has, by column, a numpy array [rows, ...], a `Jagged` numpy array,
            or a list of strings; of columns in `Worker.on_device` that lie on a GPU, a `DeviceArray` or a `Jagged` one.
        numbers: Number of each row in the call's whole batch over all ranks, [rows] int64.
    """

    fetched: FetchedRows
    numbers: np.ndarray

    def __getitem__(self, name: str) -> Values:
        """Returns the values of a column; raises InvalidRequest if the call has no such column."""
        if name not in self.fetched.values:
            raise InvalidRequest(f"column {name!r} is missing; given: {sorted(self.fetched.values)}")
        return self.fetched.values[name]

    def __contains__(self, name: str) -> bool:
        """Whether the call has this column."""
        return name in self.fetched.values

    def texts(self, name: str) -> list[str]:
        """Returns a column of strings.

        Raises:
            InvalidRequest: The column is missing or is not text.
        """
        values = self[name]
        if not isinstance(values, list):
            raise InvalidRequest(f"column {name!r} is not text")
        return values

    @property
    def count(self) -> int:
        """Number of rows on this rank."""
        return self.fetched.rows


NO_ROWS = CallRows(FetchedRows(0, {}, {}, 0), np.empty(0, np.int64))


@dataclass
class CallContext:
    """State of a running call that its method reads and updates.

    Attributes:
        call: Header of the call: its id, session, sequence number, seed and so on.
        deadline: Latest end of the call, in seconds of `time.monotonic()`.
        cancelled: Whether the call has been asked to stop before its deadline.
        is_late: Whether the service has found that the deadline has passed.
        done, done_of: Progress that Watch reports: units of work done, and their total; 0 of 0 if unknown.
        stuck_timeout_s: Seconds without progress after the deadline until the call counts as stuck.
        progressed_at: When `progress` was last called, in seconds of `time.monotonic()`; 0 for never.
        others: Names of the other sessions that were open on this rank when the method was called. They may differ
            from rank to rank, and there are none where the service is not shared.
    """

    call: common_pb2.Call
    deadline: float
    cancelled: bool = False
    is_late: bool = False
    done: int = 0
    done_of: int = 0
    stuck_timeout_s: float = 60.0
    progressed_at: float = 0.0
    others: frozenset[str] = frozenset()

    @property
    def peers_deadline(self) -> float:
        """Latest time to wait for the other ranks of the call, in seconds of `time.monotonic()`. Later than the
        call's deadline, since a rank may notice the deadline some time after it, and computed anew at each read."""
        return max(self.deadline, time.monotonic()) + PATIENCE * self.stuck_timeout_s

    @property
    def stopping(self) -> bool:
        """Whether the method should stop: the call was cancelled or is past its deadline."""
        return self.cancelled or self.is_late or time.monotonic() > self.deadline

    def check_cancelled(self) -> None:
        """Raises CallCancelled if the call was cancelled. For waits that check the deadline themselves and raise a more
        specific error."""
        if self.cancelled:
            raise CallCancelled(f"call {self.call.call_id} was cancelled")

    def check(self) -> None:
        """Raises CallCancelled or DeadlineExceeded if the call should stop. Methods call it between pieces of
        work."""
        self.check_cancelled()
        if self.stopping:
            raise DeadlineExceeded(f"call {self.call.call_id} ran past its deadline")

    def progress(self, done: int, of: int) -> None:
        """Notes that `done` units of work of `of` are done, for Watch and for the detection of stuck calls."""
        self.done, self.done_of, self.progressed_at = done, of, time.monotonic()


@dataclass(frozen=True)
class CallResult:
    """Result of a worker's method on one rank.

    Attributes:
        columns: Values of the output rows, by column: numpy arrays, `Jagged`, torch tensors, or lists of strings,
            which are sent in the response message itself.
        metrics: (sum, count) of each metric, by name; the controller adds both over ranks and divides.
        fields: Further fields of the response message, by name.
        verified: Whether the method itself has verified that its input rows were intact (`FetchedRows.verify`), as
            one that changes weights does before the change takes effect. If False, they are verified after it.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False


class Worker:
    """Base class of the object that does a role's work on one rank. A subclass adds the methods of its role's proto;
    this class implements those of WorkerService for roles without weights.

    Args:
        table: The service's table of the configuration.
        ranks: Ranks of the service.
    """

    role: ClassVar[str]
    """Role whose methods this worker has, as `rlhf.roles.find_role` takes it; that of an outside package is best named
    as module:object, which finds it with and without an entry point."""
    also_serves: ClassVar[tuple[str, ...]] = ()
    """Names of further roles whose methods this worker also has; calls of all roles share one order."""
    is_frozen: ClassVar[bool] = False
    """Whether no call changes what later calls return, so that several sessions may share the service at a time."""
    on_device: ClassVar[frozenset[str]] = frozenset()
    """Names of columns that methods read on the GPU: fetched ones that lie on a GPU stay on one, as `DeviceArray`.
    Their tensors must not be modified. Default: none; all columns come to host memory."""
    beside: frozenset[str] = frozenset()
    """Python names of methods whose calls without a sequence number run concurrently with ordered calls, one at a time
    on a separate thread. They take no rows and are not collective. Default: none."""
    writes_to_rows: ClassVar[bool] = False
    """Whether arrays fetched from other ranks must be writable (see `Fetcher.fetch`). Arrays that are sent in the
    request message itself are read-only in any case."""
    buckets: BucketBoard
    """Board on which the rank offers buckets of weights. Set by the server, before the first call."""
    fetcher: Fetcher
    """Reads memory of other ranks. Set by the server, before the first call."""

    def __init__(self, table: ServiceTable, ranks: Ranks) -> None:
        self.table = self.config_table = table
        self.ranks = ranks
        self.policy_version = 0
        self.service = self.role
        """Name of the service in its config. Default: the role."""
        self.output_roots: tuple[Path, ...] = ()
        """Directories below which the rank may write, with symbolic links resolved. Default: none."""
        self.losses: frozenset[str] = frozenset()
        """Losses as "module:object" that the rank imports where a request names them. Default: none."""
        self.shares_device = bool(table.pool)
        """Whether other services may compute on this rank's device, so that it keeps no memory cached between calls."""
        self.progressed_at = 0.0
        """When the running method last made progress, in seconds of `time.monotonic()`; 0 for never."""

    @property
    def state_id(self) -> str:
        """Id of the state of weights and optimizer, as the proto describes it in Outcome. Default: "", for a role
        without such a state, or one that does not know when it changes: a resumed run loads that from its
        checkpoint."""
        return ""

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        """Returns whether a service with this table computes with torch, and so needs a process group. Default:
        False."""
        return False

    @classmethod
    def import_engines(cls, table: ServiceTable) -> None:
        """Imports the engines that a service with this table names, before a worker is built. Default: does nothing.

        Raises:
            ConfigError: An engine cannot be imported; the text says how to install it.
        """

    def prepare_thread(self) -> None:
        """Prepares a thread of this rank that may touch its device; the compute thread and the writer of checkpoints
        call this once at their start. Default: does nothing."""

    def close(self) -> None:
        """Ends processes and threads that the role has started. Called on the compute thread after the server has
        drained. Default: does nothing."""

    def device(self) -> dict[str, str]:
        """Returns the fields `device` and `device_uuid` of RankInfo, by name. Default: "cpu" and ""."""
        return {"device": "cpu", "device_uuid": ""}

    def gpu(self) -> tuple[Cuda, DeviceTensors] | None:
        """Returns this rank's GPU and its tensors, for the arena in which columns stay on the GPU. Called once, after
        the worker is built. Default: None; the rank computes on the CPU, and uses no CUDA."""
        return None

    def device_memory(self) -> int:
        """Returns the bytes that are allocated on this rank's GPU now; 0 on a CPU. Default: 0."""
        return 0

    def gauges(self) -> dict[str, float]:
        """Returns further figures of this rank by name. Watch streams them, and the controller adds them up over the
        ranks for metric `rank/SERVICE/NAME` of each step. Called on the event loop, so it must return at once. Default:
        cpu_s, the CPU time of this process in seconds."""
        return {"cpu_s": time.process_time()}

    def peak_device_memory(self) -> int:
        """Returns the most bytes that were allocated at a time on this rank's GPU while the last method ran; 0 on a
        CPU. Default: 0."""
        return 0

    def describe(self) -> worker_pb2.DescribeResponse:
        """Returns Describe's response with the fields that the role knows; the server adds the others. Default: the
        limit that there are no weights."""
        return worker_pb2.DescribeResponse(limits=["there are no weights to offload, save or load"])

    @register("ONE_TO_ALL", collective=False, instant=True)
    def synchronize(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Does nothing: it runs after all earlier calls of the session, so its response says that they have ended."""
        return CallResult()

    @register("ONE_TO_ALL", collective=False, instant=True)
    def verify_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: does nothing; the response says that 0 bytes were verified."""
        return CallResult()

    @register("ONE_TO_ALL", collective=False)
    def describe_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: does nothing; the response has no slices."""
        return CallResult()

    @register("ONE_TO_ALL", collective=False)
    def send_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without a training engine: raises InvalidRequest."""
        raise InvalidRequest(f"{self.role} has no weights to send")

    @register("ONE_TO_ALL", collective=False)
    def begin_session(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: does nothing; raises InvalidRequest if the request names
        directories."""
        if request.directories:
            raise InvalidRequest(f"{self.role} has no weights to save")
        return CallResult()

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: does nothing; the response says that 0 bytes were moved."""
        return CallResult(fields={"moved_bytes": 0})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: does nothing; the response says that 0 bytes were moved."""
        return CallResult(fields={"moved_bytes": 0})

    @register("ONE_TO_ALL", collective=False)
    def profile(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Profile: requests a trace of this rank's next calls; returns the path at which it will be."""
        return CallResult(fields={"path": self.request_profile(request)})

    def request_profile(self, request: Any) -> str:
        """Requests a trace of this rank's next calls, and returns its path. May be called on any thread. Default, for a
        role that computes without torch, whose profiler this would run: raises InvalidRequest."""
        raise InvalidRequest(f"{self.role} computes without torch, so there is nothing to profile")

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: raises InvalidRequest."""
        raise InvalidRequest(f"{self.role} has no weights to save")

    @register("ONE_TO_ALL")
    def load_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Default, for a role without weights: raises InvalidRequest."""
        raise InvalidRequest(f"{self.role} has no weights to load")

    def writing(self, directory: Path) -> Future[list[WrittenFile]]:
        """Returns a future of the files of a checkpoint that this rank writes in the background, with absolute paths.
        Called on the event loop, so it must return at once.

        Default, for a role whose SaveCheckpoint responds when everything is written: all files of the directory on
        rank 0, and none on other ranks.

        Args:
            directory: Directory that SaveCheckpoint was called with, as `output_path` returns it.

        Raises:
            Refused: The rank writes no such checkpoint.
        """
        if not directory.is_dir():
            raise Refused(f"there is no checkpoint in {directory}")
        written: Future[list[WrittenFile]] = Future()
        written.set_result(written_below(directory) if self.ranks.rank == 0 else [])
        return written

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        """Calls `run`, which runs a method, and returns its result. Default: nothing else. A role may override it,
        for example to profile."""
        return run()

    def leave(self, why: str) -> NoReturn:
        """Prints the reason `why` and ends this process immediately, with status 70. For a rank that is stuck or out
        of step with its peers."""
        print(f"fatal: {self.role} rank {self.ranks.rank}: {why}; leaving", file=sys.stderr, flush=True)
        os._exit(70)

    def progressed(self) -> None:
        """Sets `progressed_at` to now. The running method calls it as it proceeds: a call past its deadline is not
        stuck as long as it makes progress."""
        self.progressed_at = time.monotonic()

    def output_path(self, directory: str) -> Path:
        """Returns the path of a directory that a request names, with symbolic links resolved. It need not exist, and is
        not created.

        Raises:
            InvalidRequest: The directory is one of `output_roots` or outside all of them, or the path is invalid.
        """
        try:
            path = Path(directory).resolve()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.stat()  # raises for a path that is too long, and from Python 3.13 for a loop of links
        except (OSError, ValueError, RuntimeError) as error:
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
    """Raises InvalidRequest if one of the named fields of a request is not set. A field without `optional` that has
    its type's default, such as 0 or "", counts as not set."""
    given = {field.name for field, _ in request.ListFields()}
    missing = [name for name in names if name not in given]
    if missing:
        raise InvalidRequest(f"{' and '.join(missing)} must be given")


def registered_methods(worker: type[Worker]) -> dict[str, tuple[Method, Registration]]:
    """Returns the methods that the controller calls on all ranks of a worker's roles, with their registrations. Methods
    of the same name in several roles are the same method of the worker.

    Returns:
        (method, registration) by the method's path, such as "/rlhf.v1.ActorService/UpdateActor".

    Raises:
        ConfigError: The worker lacks a method of its proto, or registers it with a different transfer protocol than
            the proto declares.
    """
    found = {}
    roles = (worker.role, *worker.also_serves)
    for method in {method.path: method for role in roles for method in group_methods(role).values()}.values():
        name = method.snake_name
        registration = getattr(getattr(worker, name, None), "registration", None)
        if registration is None:
            raise ConfigError(f"{worker.__name__} has no registered method {name} for {method.path}")
        declared = method.spec.transfer_protocol  # type: ignore[union-attr]
        if registration.protocol != declared:
            raise ConfigError(
                f"{worker.__name__}.{name} is registered with {registration.protocol}, "
                f"but {method.path} declares {declared}"
            )
        found[method.path] = (method, registration)
    return found
