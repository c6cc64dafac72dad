"""One call of a role group: waits for its inputs and its turn, sends one request per rank, collects the rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.fanout import FanOut
from client.session import Session, StepContext
from controller.role_groups.balance import deal
from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import awaited
from controller.role_groups.placement import Place
from controller.role_groups.requests import BatchPart, cut, local_bytes, serialized, share_columns
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Relay
from nccl_transfer.refs.protocols import TransferProtocol, get_protocol
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint
from rlhf.contract import Method
from rlhf.errors import DeadlineExceeded
from rlhf.v1 import common_pb2, worker_pb2


@dataclass(frozen=True)
class Callee:
    """The ranks that calls of a group run on.

    Attributes:
        name: Name of the group in the config.
        ranks: Their clients and queue.
        description: Description of the service by rank 0.
        mesh: Their mesh.
        endpoints: Where each serves, in rank order.
        codec: Messages of the role.
        session: Session of the run.
    """

    name: str
    ranks: FanOut
    description: worker_pb2.DescribeResponse
    mesh: Mesh
    endpoints: Sequence[Endpoint]
    codec: BatchCodec
    session: Session


@dataclass(frozen=True)
class GroupCall:
    """A call of a method on all ranks of a group.

    Attributes:
        callee: The ranks.
        method: The method.
        header: Header of the requests, without the sequence number and the epoch of the service.
        inputs: Columns that the method reads.
        options: Further fields of the request.
        step: The step on whose behalf it is made.
        place: Its place in the order of calls on its devices.
    """

    callee: Callee
    method: Method
    header: common_pb2.Call
    inputs: FutureBatch
    options: dict[str, Any]
    step: StepContext
    place: Place

    async def run(self, running: dict[str, str]) -> tuple[Batch, CallRecord]:
        """Makes the call.

        Args:
            running: Methods of the running calls by call id; has this one from when it is sent until it ends.

        Returns:
            The rows that it made, in the order of its inputs, and its record.

        Raises:
            RlhfError: A rank failed, or the call waited too long for its turn.
        """
        call_id, ranks = self.header.call_id, self.callee.ranks
        try:
            order, numbers, parts = await self._turn()
            ranks.address(self.header)
            requests = self._requests(parts, numbers)
            running[call_id] = self.method.name
            started = time.time()
            timeout_s = self.callee.session.time_of(self.method.snake_name)
            responses = await ranks.send(self.method, call_id, requests, timeout_s, self.place.was_sent)
            return self._collected(order, responses), self._record(responses, started)
        finally:
            running.pop(call_id, None)
            self.place.leave()

    @property
    def _protocol(self) -> TransferProtocol:
        return get_protocol(self.method.spec.transfer_protocol)  # type: ignore[union-attr]

    async def _turn(self) -> tuple[np.ndarray, np.ndarray, list[BatchPart]]:
        """Waits until the call may be sent; returns the order and the numbers of its rows, and its parts.

        Raises:
            DeadlineExceeded: The wait is longer than all calls before this one may take.
        """
        names = list(self.inputs.columns)
        try:
            async with asyncio.timeout(self.place.patience_s) as patience:
                columns = await awaited(self.inputs.columns[name] for name in names)
                batch = Batch(self.inputs.rows, dict(zip(names, columns, strict=True)))
                order, numbers = self._dealt(batch)
                parts = await self._parts(batch.take(order))
                await awaited(self.place.first)
        except TimeoutError as error:
            if not patience.expired():
                raise
            missing = [name for name, column in self.inputs.columns.items() if not column.done()]
            awaiting = f"columns {missing}" if missing else "the calls before it on its devices to end"
            raise DeadlineExceeded(
                f"{self.callee.name}.{self.method.snake_name} waited {self.place.patience_s:g} s for {awaiting}, which "
                "is longer than all calls before it may take"
            ) from error
        return order, numbers, parts

    def _dealt(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The order in which the rows are cut into parts, and their numbers: by cost where all lengths are known."""
        rows, lengths, protocol = np.arange(batch.rows), _lengths(batch), self._protocol
        if not self.callee.session.balance or lengths is None or not protocol.splits or protocol.pads:
            return rows, rows
        block = max(self.options["schedule"].mini_batches, 1) if "schedule" in self.options else 1
        return deal(lengths, protocol.parts(self.callee.mesh), block)

    async def _parts(self, batch: Batch) -> list[BatchPart]:
        """The rows of each part, by the method's transfer protocol; none of a method that takes no rows."""
        if not self.method.takes_rows:
            return []
        parts = cut(batch, self._protocol, self.callee.mesh)
        if not self.callee.description.dispatches:
            return parts
        session = self.callee.session
        return await share_columns(
            parts, self.callee.ranks.clients, session.name, self.step, session.timeout_s
        )

    def _requests(self, parts: Sequence[BatchPart], numbers: np.ndarray) -> list[bytes]:
        """One serialized request per rank."""
        if not self.method.takes_rows:
            request = self.method.request(call=self.header, **self.options).SerializeToString()
            return [request] * len(self.callee.endpoints)

        def encode(part: BatchPart, relays: Sequence[Relay]) -> Any:
            rows = numbers[part.places]
            return self.callee.codec.request(self.method, self.header, part.batch, rows, relays, self.options)

        self.step.count_bytes(sum(local_bytes(part.batch) * len(part.ranks) for part in parts))
        return serialized(parts, self.callee.endpoints, encode)

    def _collected(self, order: np.ndarray, responses: Sequence[Any]) -> Batch:
        """The rows that the ranks made, in the order of the inputs."""
        protocol, mesh, rows = self._protocol, self.callee.mesh, len(order)
        if not (self.method.outputs and protocol.splits):
            return Batch(0, {})
        collected = [responses[rank] for rank in protocol.collect(mesh)]
        made = protocol.restore(self.callee.codec.rows_of(self.method, collected, rows), rows, mesh)
        if made.rows == rows:
            made = made.take(np.argsort(order))
        self.step.count_bytes(local_bytes(made))
        return made

    def _record(self, responses: Sequence[Any], started_s: float) -> CallRecord:
        collected = [responses[rank] for rank in self._protocol.collect(self.callee.mesh)]
        # A server of another package has no queue of ours.
        is_ours = bool(self.callee.description.epoch)
        queued_s = min(response.outcome.timing.queue_s for response in responses) if is_ours else 0.0
        return CallRecord(
            service=self.callee.name,
            method=self.method.snake_name,
            started_s=started_s + queued_s,
            ended_s=time.time(),
            metrics=_mean_metrics(collected),
            policy_version=responses[0].outcome.policy_version,
            responses=tuple(responses),
        )


def _lengths(batch: Batch) -> np.ndarray | None:
    """Tokens of each row's sequence [rows] int64; None where the batch does not have them."""
    columns = [batch.columns.get(name) for name in ("prompt_ids", "response_ids")]
    lengths = [column.lengths for column in columns if isinstance(column, RemoteColumn)]
    if len(lengths) < 2 or lengths[0] is None or lengths[1] is None:
        return None
    return lengths[0] + lengths[1]


def _mean_metrics(responses: Sequence[Any]) -> dict[str, float]:
    """Means over ranks, weighted by their counts."""
    sums: dict[str, list[float]] = {}
    for response in responses:
        for name, mean in response.outcome.metrics.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += mean.sum
            entry[1] += mean.count
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}
