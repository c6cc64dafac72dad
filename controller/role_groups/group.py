"""Role groups: all ranks of one service, called as one (HybridFlow, section 4).

A call selects the columns that its proto declares, cuts the rows into parts by the method's transfer protocol, sends
one request to each rank, and collects references to the rows that the ranks made. Tensors stay on the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from client.fanout import FanOut
from client.rank import WORKER
from client.session import Session, StepContext
from controller.role_groups.call import Callee, GroupCall
from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import then
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Placement
from nccl_transfer.refs.batch import Batch, Column
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, mesh_from_proto
from rlhf.contract import group_methods
from rlhf.errors import InvalidRequest
from rlhf.v1 import worker_pb2

G = TypeVar("G", bound="RoleGroup")

LATE_S = 15.0
"""Longest time of a call past its deadline, in which its outcome is asked for and other ranks are stopped."""
INTRODUCE_S = 60.0
"""Longest time of Introduce, once in a session."""


class RoleGroup:
    """All ranks of one service, in one of its roles.

    Args:
        ranks: The ranks; groups of two roles of one service share them.
        description: Description of the service by rank 0.
        devices: Devices it runs on; calls on common devices take turns.
        session: Session of the run.
        placement: Order of calls on devices, one for all groups.
        loop: Event loop of the clients.
        name: Name of the group; by default that of the service.

    Attributes:
        running: Methods of the running calls, by call id.
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
    ) -> None:
        self.name = name or ranks.service
        self.ranks = ranks
        self.clients = ranks.clients
        self.description = description
        self.mesh = mesh_from_proto(description.mesh)
        self.session = session
        self.running: dict[str, str] = {}
        self._devices = devices
        self._placement = placement
        self._loop = loop
        self._methods = group_methods(description.role)
        endpoints = [endpoint_from_proto(rank.endpoint) for rank in description.ranks]
        self._callee = Callee(self.name, ranks, description, self.mesh, endpoints, self._codec(), session)

    def _codec(self) -> BatchCodec:
        """Messages of the role."""
        return BatchCodec()

    def in_role(self, kind: type[G], role: str) -> G:
        """A group of the same ranks in another role that they serve. Calls of both groups share one queue."""
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
        **options: Any,
    ) -> FutureBatch:
        """Calls a method on all ranks, once its inputs are resolved and its devices are free.

        Args:
            name: Python name of the method.
            batch: Rows; only the columns that the method declares travel.
            outputs: Columns that the call returns. Default: all that the method declares.
            options: Further fields of the request.

        Returns:
            The rows with the columns that the call computes, as futures; the method itself does not wait.

        Raises:
            InvalidRequest: A column that the method needs is missing.
        """
        method = self._methods[name]
        batch = batch or FutureBatch(0, {})
        missing = [column for column in method.inputs if column not in batch]
        if missing:
            raise InvalidRequest(
                f"{self.name}.{name} needs columns {missing}; the batch has {sorted(batch.columns)}"
            )
        inputs = batch.select([c for c in (*method.inputs, *method.optional_inputs) if c in batch])
        step = self.session.step_of(batch.step)
        header = self.session.header(step, self.name, name)
        longest_s = 2 * self.session.time_of(name) + LATE_S
        place = self._placement.enter(self._devices, self.ranks, longest_s)
        call = GroupCall(self._callee, method, header, inputs, options, step, place)
        result = self._loop.start(call.run(self.running))
        step.made(result)
        expected = method.outputs if outputs is None else outputs
        columns = {column: _column_of(result, column) for column in expected}
        return FutureBatch(batch.rows, columns, (_record_of(result),), batch.step)

    async def cancel_all(self) -> None:
        """Asks the ranks to stop the running calls."""
        await asyncio.gather(*(self.ranks.cancel(call_id) for call_id in list(self.running)))

    def release(self, step: StepContext) -> Future[None]:
        """Frees the rows that a step's calls have made, on every rank."""
        request = worker_pb2.ReleaseRequest(session=self.session.name, steps=[step.number])
        return self._loop.start(self.ranks.reach_all(WORKER["Release"], request, self.session.timeout_s))

    def introduce(self, request: bytes) -> Future[None]:
        """Sends every rank the endpoints that take part in the session, in a serialized IntroduceRequest."""
        return self._loop.start(self.ranks.reach_all(WORKER["Introduce"], request, INTRODUCE_S))

    def begin_session(self, keep_weights: bool, directories: Sequence[str] = ()) -> FutureBatch:
        """Begins the session from the model directory, or from the weights that the session before left.

        Args:
            directories: Directories that the service is going to write to; the call fails where it cannot.
        """
        return self.call("begin_session", keep_weights=keep_weights, directories=directories)

    def synchronize(self) -> FutureBatch:
        """A fence: done when every earlier call of the group is."""
        return self.call("synchronize")

    def offload(self) -> FutureBatch:
        """Moves weights and optimizer state off the devices."""
        return self.call("offload")

    def onload(self) -> FutureBatch:
        """Moves weights and optimizer state back onto the devices."""
        return self.call("onload")

    def save_checkpoint(self, directory: str, format: worker_pb2.CheckpointFormat) -> FutureBatch:
        """Writes weights, or weights and optimizer state, on the ranks' hosts."""
        return self.call("save_checkpoint", directory=directory, format=format)

    def load_checkpoint(self, directory: str) -> FutureBatch:
        """Reads a sharded checkpoint back."""
        return self.call("load_checkpoint", directory=directory)

    def profile(self, directory: str, calls: int) -> FutureBatch:
        """Traces the next calls of every rank into a directory on its host."""
        return self.call("profile", directory=directory, calls=calls)


def _column_of(result: Future[tuple[Batch, CallRecord]], name: str) -> Future[Column]:
    return then(result, lambda made: made[0][name])


def _record_of(result: Future[tuple[Batch, CallRecord]]) -> Future[CallRecord]:
    return then(result, lambda made: made[1])
