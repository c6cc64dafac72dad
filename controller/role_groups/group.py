"""Role groups: all ranks of one service, called as one (HybridFlow, section 4).

A call selects the columns that its proto declares, cuts the rows into parts by the method's transfer protocol, sends
one request to each rank, and collects references to the rows that the ranks made. Tensors stay on the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from client.fanout import FanOut
from client.rank import WORKER, RankClient
from client.session import AFTER_UPDATES, Session, StepContext
from controller.role_groups.call import Callee, GroupCall, RunningCall
from controller.role_groups.chunked_call import batch_of, first_rows, is_row_wise
from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import Promise, lateness_of, pass_on, resolved
from controller.role_groups.joint_calls import SYNC, JointCalls, JointPlaces, in_places
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Place, Placement
from controller.role_groups.replacement import Replacement, is_loss
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, mesh_from_proto
from rlhf.contract import Method, group_methods
from rlhf.errors import InvalidRequest, RlhfError
from rlhf.plugins import nearest
from rlhf.v1 import common_pb2, worker_pb2

G = TypeVar("G", bound="CallingGroup")
T = TypeVar("T")

LATE_S = 15.0
"""Longest time, in seconds, that a call may take past its timeout: the ranks are asked for its outcome and to cancel
it."""
INTRODUCE_S = 60.0
"""Timeout of Introduce, in seconds."""
GENERATES = "generate_sequences"
"""Python name of the method that runs ahead of the updates of earlier steps, where `run.ahead` says so."""


class CallingGroup:
    """Makes calls on all ranks of one service in one of its roles, and returns without waiting; see `RoleGroup`.

    Args:
        ranks: Sends calls to all ranks; role groups of two roles of one service share it.
        description: Response of rank 0 to Describe.
        devices: Names of the devices that the service runs on; calls on the same device run one after another.
        session: Session of the run.
        placement: Order of calls on devices; all groups share one.
        loop: Event loop that the clients run on.
        name: Name of the group. Default: that of the service.
        learns: Whether training changes the state of the service.

    Attributes:
        running: Running calls, by call id.
        replacement: Has calls sent again whose service is lost. None: they fail.
    """

    def __init__(
        self,
        ranks: FanOut,
        description: worker_pb2.DescribeResponse,
        devices: frozenset[str],
        session: Session,
        placement: Placement,
        loop: Loop,
        name: str = "",
        *,
        learns: bool = False,
    ) -> None:
        self._learns = learns
        self.name = name or ranks.service
        self.ranks = ranks
        self.clients = ranks.clients
        self.description = description
        self.mesh = mesh_from_proto(description.mesh)
        self.session = session
        self.running: dict[str, RunningCall] = {}
        self.replacement: Replacement | None = None
        self._devices = devices
        self._placement, self._loop = placement, loop
        self._settled: Future[None] = resolved(None)
        """Resolved when the last call without rows has ended. Of the methods of a service that does not learn, only
        those without rows may change its state."""
        self._methods = group_methods(description.role)
        endpoints = [endpoint_from_proto(rank.endpoint) for rank in description.ranks]
        self._callee = Callee(self.name, ranks, description, self.mesh, endpoints, self._codec(), session)
        if self.name == ranks.service:
            placement.moved_by(self.name, self._move)

    def _codec(self) -> BatchCodec:
        """Makes the codec of the role's messages. Default: a `BatchCodec`; a subclass may return one of its own."""
        return BatchCodec()

    def in_role(self, kind: type[G], role: str) -> G:
        """Returns a group of the same ranks in a different role that they serve too.

        Args:
            kind: Class of the group.
            role: The role, which is also the name of the group.
        """
        description = worker_pb2.DescribeResponse()
        description.CopyFrom(self.description)
        description.role = role
        return kind(
            self.ranks, description, self._devices, self.session, self._placement, self._loop, name=role
        )

    def call(
        self,
        name: str,
        batch: FutureBatch | None = None,
        outputs: Sequence[str] | None = None,
        lateness: int = 0,
        **options: Any,
    ) -> FutureBatch:
        """Starts a call of a method on all ranks and returns without waiting. The requests are sent when the input
        columns are resolved and the calls before it on the same devices have ended. In a step with a gate, a call to a
        service that learns, unless it generates, and a call with an input from such a call enter the order of calls
        when the gate is opened. Rows in chunks are sent in one call per chunk if the method computes columns.

        Args:
            name: Python name of the method.
            batch: Rows of the call; only the columns that the method declares are sent. Default: no rows.
            outputs: Names of the columns that the call returns. Default: all that the method declares.
            lateness: Least lateness of the call, by which a gate of the step keeps it; see `StepContext.gate_of`.
            options: Further fields of the request, by name.

        Returns:
            The same rows with only the columns that the call computes, as futures.

        Raises:
            InvalidRequest: There is no such method, or `batch` lacks a column that it needs.
        """
        method, batch = _known(self._methods, name, self.name), batch or FutureBatch(0, {})
        inputs, step = inputs_of(self.name, method, batch), self.session.step_of(batch.step)
        chunks = inputs.chunks() if is_row_wise(method) else [inputs]
        headers = self.session.headers(step, self.name, name, len(chunks))
        made = [
            self._start(method, header, rows, options, step, lateness, first)
            for header, rows, first in zip(headers, chunks, first_rows(chunks), strict=True)
        ]
        return batch_of(self._callee, method, chunks, made, method.outputs if outputs is None else outputs)

    def call_prepared(self, name: str, by: str, batch: FutureBatch, **options: Any) -> FutureBatch:
        """Starts a call of a method on all rows as `call` does, and before it, where rows are in chunks and the ranks
        serve method `by`, a call of that for each chunk but the last, which begins when the columns of the chunk are
        there. Each rank then has the rows that it gets by the call itself, with the same numbers. The requests of `by`
        also have field `rows`, the number of all rows, and that of the call has field `prepared`.

        Args:
            name, batch, options: As for `call`.
            by: Python name of the other method, which makes no columns.

        Returns:
            A batch without columns, with the record of the call, and that of the calls of `by` where there are any.
        """
        method, step = self._methods[by], self.session.step_of(batch.step)
        whole = inputs_of(self.name, method, batch)
        early = whole.chunks()[:-1] if self.serves(by) else []
        if not early:
            return self.call(name, batch, **options)
        *headers, last = self.session.headers(step, self.name, name, 1, prepared_by=len(early))
        made = [
            self._start(method, header, rows, {**options, "rows": whole.rows}, step, 0, first, whole)
            for header, rows, first in zip(headers, early, first_rows(early), strict=True)
        ]
        prepared = batch_of(self._callee, method, early, made, ())
        method = self._methods[name]
        inputs = inputs_of(self.name, method, batch)
        result = self._start(method, last, inputs, {**options, "prepared": True}, step)
        done = batch_of(self._callee, method, [inputs], [result], ())
        return replace(done, calls=(*done.calls, *prepared.calls))

    def serves(self, name: str) -> bool:
        """Whether the ranks serve a method, which a service of another version may not."""
        path = self._methods[name].path[1:]
        return any(method.name == path for method in self.description.methods)

    def _start(
        self,
        method: Method,
        header: common_pb2.Call,
        rows: FutureBatch,
        options: dict[str, Any],
        step: StepContext,
        lateness: int = 0,
        first: int = 0,
        within: FutureBatch | None = None,
    ) -> Future[Any]:
        """Starts one call without waiting, or has the step's gate keep it; returns the future of its rows and record.
        Arguments as of `call` and `GroupCall`."""
        name = method.snake_name
        if self._learns and method.takes_rows and name != GENERATES:
            lateness = AFTER_UPDATES
        longest_s = longest_time(self.session, name, self.replacement)

        def begin() -> Future[Any]:
            with self._placement.turn([self.ranks.service], name, step) as moved:
                place = self._placement.enter(self._devices, self.ranks, longest_s)
                if not method.takes_rows:
                    self._settled = place.ended
                parts = self._callee, method, header, rows, options, step, place, moved, first
                call = GroupCall(*parts, within=within, replacement=self.replacement)
                return self._loop.start(call.run(self.running))

        lateness = max(lateness, lateness_of(rows.columns.values()))
        return _begun(begin, step, lateness, "" if method.outputs else f"{self.name}.{name}")

    def call_with(
        self,
        others: Sequence[CallingGroup],
        calls: JointCalls,
        longest_s: float,
        of: StepContext | None = None,
        *,
        beside: bool = False,
    ) -> FutureBatch:
        """Starts several calls of this group and other groups as one unit, and returns without waiting. The unit has
        one place in the order of calls and occupies the devices of all these groups while `calls` runs. In a step with
        a gate, it enters the order when the gate is opened, if this group's service learns.

        Args:
            others: The other groups.
            calls: Coroutine function that makes the calls by `call_within`, in the step and at the places that it is
                given, and returns the record of the whole, of which theirs are parts.
            longest_s: Longest time that it takes, in seconds.
            of: The step that they belong to. Default: the one begun last.
            beside: Whether calls of the others on rows go on meanwhile, and only this group's devices are theirs. The
                others then have places of their own, behind, for the last call of each. `calls` begins when the calls
                of the others without rows before it have ended.

        Returns:
            A batch without rows, whose record is the one that `calls` returned.
        """
        step = self.session.step_of(of)
        devices = self._devices.union(*(group._devices for group in others if not beside))

        def begin() -> Future[CallRecord]:
            names = [self.ranks.service, *(group.ranks.service for group in others)]
            with self._placement.turn(names, "describe_weights", step) as moved:
                held, first = self._placement.enter(devices, object(), longest_s), list[Future[Any]]()
                later: dict[str, Place] = {}
                for group in others:
                    if beside:
                        first.append(group._settled)
                        later[group.name] = self._placement.enter(group._devices, group.ranks, longest_s)
                    group._settled = later.get(group.name, held).ended
                return self._loop.start(in_places(JointPlaces(held, later, first), moved, calls, step))

        begun = _begun(begin, step, AFTER_UPDATES if self._learns else 0, f"{self.name}.{SYNC}")
        return FutureBatch(0, {}, (begun,), of)

    def runs_beside(self, name: str) -> bool:
        """Returns whether the ranks execute calls of a method concurrently with ordered calls."""
        path = self._methods[name].path[1:]
        return any(method.beside and method.name == path for method in self.description.methods)

    async def call_within(
        self,
        name: str,
        step: StepContext,
        place: Place | None = None,
        *,
        beside: bool = False,
        **options: Any,
    ) -> CallRecord:
        """Coroutine of a call without rows, for `call_with`: returns its record.

        Args:
            name, options: As for `call`.
            step: The step that it belongs to.
            place: Its place, one of `JointPlaces.later`. Default: that of the whole; it is sent at once.
            beside: Whether the ranks execute it concurrently with ordered calls.
        """
        place = place or Place(self.ranks, [], self.session.timeout_s)
        header = self.session.header(step, self.name, name)
        call = GroupCall(
            self._callee, self._methods[name], header, FutureBatch(0, {}), options, step, place, beside=beside
        )
        _, record = await call.run(self.running)
        return record

    def _move(self, name: str, step: StepContext, moved: Sequence[Future[Any]]) -> Future[Any]:
        """Starts `offload` or `onload` before another call of a step. `moved`: as of a `GroupCall`. Does not wait."""
        place = self._placement.enter(self._devices, self.ranks, longest_time(self.session, name))
        header, nothing = self.session.header(step, self.name, name), FutureBatch(0, {})
        call = GroupCall(self._callee, self._methods[name], header, nothing, {}, step, place, moved)
        step.made(result := self._loop.start(call.run(self.running)), f"{self.name}.{name}")
        return result


class RoleGroup(CallingGroup):
    """All ranks of one service in one of its roles, with the methods that every role serves. A method starts a call on
    all ranks and returns without waiting: a batch of futures, without columns unless it says which.
    """

    async def cancel_all(self) -> None:
        """Coroutine that asks all ranks to cancel the running calls of this group, and waits for the responses to
        Cancel; ranks that do not respond raise no error."""
        await asyncio.gather(*(self.ranks.cancel(call_id) for call_id in list(self.running)))

    def release(self, step: StepContext) -> Future[None]:
        """Frees the rows that the calls of a step made, on every rank. Returns a future that is resolved when all
        ranks have responded."""
        return self._loop.start(self._release(step))

    async def _release(self, step: StepContext) -> None:
        request = worker_pb2.ReleaseRequest(session=self.session.name, steps=[step.number])
        try:
            await self.ranks.reach_all(WORKER["Release"], request, self.session.timeout_s)
        except RlhfError as error:
            # The rows of a lost rank are gone with it, and the next call has it replaced.
            if not (self.replacement and is_loss(error)):
                raise

    async def introduce(self, endpoints: Sequence[common_pb2.Endpoint]) -> None:
        """Coroutine that sends every rank endpoints of ranks in the session, to which it may connect then. Raises
        RlhfError where a rank does not respond."""
        request = worker_pb2.IntroduceRequest(session=self.session.name, endpoints=endpoints)
        await self.ranks.reach_all(WORKER["Introduce"], request.SerializeToString(), INTRODUCE_S)

    def renew(self, clients: Sequence[RankClient], description: worker_pb2.DescribeResponse) -> None:
        """Goes on with the ranks of the service that was started again. To be called on the event loop.

        Args:
            clients: One client per rank, in rank order.
            description: Response of rank 0 to Describe.
        """
        self.ranks.renew(clients, description.epoch)
        self.description = self._callee.description = description
        self._callee.endpoints = [endpoint_from_proto(rank.endpoint) for rank in description.ranks]

    def begin_session(
        self, keep_weights: bool, directories: Sequence[str] = (), rejected_directory: str = ""
    ) -> FutureBatch:
        """Begins the session of the run on all ranks.

        Args:
            keep_weights: Whether to keep the weights that the previous session left. False: load the model directory.
            directories: Directories that the service is going to write to; the call fails where it cannot.
            rejected_directory: Directory in which ranks keep the rows that they refuse to train on. Empty: none.
        """
        return self.call(
            "begin_session",
            keep_weights=keep_weights,
            directories=directories,
            rejected_directory=rejected_directory,
        )

    def synchronize(self) -> FutureBatch:
        """Calls Synchronize, which does nothing: its futures are resolved when all earlier calls of the group have
        ended."""
        return self.call("synchronize")

    def verify_weights(self) -> FutureBatch:
        """Compares checksums of the tensors in the memory of all ranks. Raises CorruptWeights (when resolved) where
        they differ."""
        return self.call("verify_weights")

    def offload(self) -> FutureBatch:
        """Moves weights and optimizer state from the devices to host memory."""
        return self.call("offload")

    def onload(self) -> FutureBatch:
        """Moves weights and optimizer state from host memory back to the devices."""
        return self.call("onload")

    def save_checkpoint(
        self,
        directory: str,
        format: worker_pb2.CheckpointFormat,
        *,
        in_background: bool = False,
        dtype: str = "",
    ) -> FutureBatch:
        """Writes a checkpoint to `directory` on the ranks' hosts.

        Args:
            directory: Path of the directory.
            format: HUGGING_FACE for a model directory with the weights; SHARDED for each rank's shards of weights and
                optimizer state, to resume from.
            in_background: For SHARDED: whether the call ends when the state is copied, and it is written while later
                calls run; `await_checkpoint` waits for that.
            dtype: For HUGGING_FACE: type of the weights, float32 or bfloat16. Default: `export_dtype` of the service.
        """
        options = {"format": format, "in_background": in_background, "dtype": dtype}
        return self.call("save_checkpoint", directory=directory, **options)

    def await_checkpoint(self, directory: str) -> Future[list[worker_pb2.AwaitCheckpointResponse]]:
        """Returns a future of every rank's response, in rank order, when all have written a checkpoint whose
        `save_checkpoint` was called with `in_background`; of an RlhfError where a rank fails, or has not written it
        within `run.save_timeout_s`."""
        request = worker_pb2.AwaitCheckpointRequest(directory=directory)
        timeout_s = self.session.save_timeout_s
        return self._loop.start(self.ranks.reach_all(WORKER["AwaitCheckpoint"], request, timeout_s))

    def load_checkpoint(self, directory: str, state_id: str = "") -> FutureBatch:
        """Loads weights and optimizer state from a sharded checkpoint in `directory` on the ranks' hosts. `state_id`:
        id that the state had when it was saved. Default: it gets a new one."""
        return self.call("load_checkpoint", directory=directory, state_id=state_id)

    def profile(self, directory: str, calls: int) -> FutureBatch:
        """Makes every rank trace its next `calls` calls with the profiler, into `directory` on its host."""
        return self.call("profile", directory=directory, calls=calls)


def _begun(begin: Callable[[], Future[T]], step: StepContext, lateness: int, name: str = "") -> Future[T]:
    """Begins a call, records it in its step, and returns its future without waiting.

    Args:
        begin: Function that enters the call into the order of calls and starts it.
        step: The step that it belongs to.
        lateness: Which gate of the step keeps the call until it is opened; see `StepContext.gate_of`.
        name: As for `StepContext.made`.
    """
    if gate := step.gate_of(lateness):
        result: Future[T] = Promise(lateness)
        gate.keep(lambda: pass_on(begin(), result), result)
    else:
        result = begin()
    step.made(result, name)
    return result


def longest_time(session: Session, name: str, replacement: Replacement | None = None) -> float:
    """Returns the longest time, in seconds, of a call of a method after the calls before it have ended, with all
    replacements of its service."""
    longest_s = 2 * session.time_of(name) + LATE_S
    return replacement.longest_s(longest_s) if replacement else longest_s


def _known(methods: Mapping[str, Method], name: str, group: str) -> Method:
    """Returns the method `name` of a role group; raises InvalidRequest where there is none, with those there are."""
    if name not in methods:
        known = ", ".join(methods)
        raise InvalidRequest(f"{group} has no method {name!r}{nearest(name, methods)}; it has: {known}")
    return methods[name]


def inputs_of(service: str, method: Method, batch: FutureBatch) -> FutureBatch:
    """Returns the columns of a batch that a call of a method reads, those that are optional among them where the batch
    has them. Raises InvalidRequest where one that the method needs is missing; the message names `service`."""
    missing = [column for column in method.inputs if column not in batch]
    if missing:
        raise InvalidRequest(
            f"{service}.{method.snake_name} needs columns {missing}; the batch has {sorted(batch.columns)}"
        )
    return batch.select([c for c in (*method.inputs, *method.optional_inputs) if c in batch])
