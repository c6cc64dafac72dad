"""One call of a role group: waits for its input columns and for its devices, sends one request to each rank, and
collects the rows that the ranks made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.fanout import FanOut
from client.session import Session, StepContext
from controller.role_groups.balance import by_groups, deal
from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import awaited
from controller.role_groups.placement import Place
from controller.role_groups.replacement import RESTARTS, Replacement
from controller.role_groups.requests import BatchPart, cut, local_bytes, serialized, share_columns
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Relay
from nccl_transfer.refs.protocols import TransferProtocol, WholeGroups, get_protocol
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint
from rlhf.contract import Method
from rlhf.errors import DeadlineExceeded, RlhfError
from rlhf.v1 import common_pb2, worker_pb2

LENGTHS_OF = ("prompt_ids", "response_ids")
"""Names of the columns whose lengths are those of sequences."""


@dataclass
class Callee:
    """The receiver of the calls of a role group: the ranks of its service, and what is needed to call them.
    Description and endpoints change where the service is started again.

    Attributes:
        name: Name of the role group, that of its service or of its second role.
        ranks: Sends calls to all ranks of the service.
        description: Response of rank 0 to Describe.
        mesh: Mesh of the ranks.
        endpoints: Endpoint of each rank, in rank order.
        codec: Makes requests from batches, and batches from responses.
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
class RunningCall:
    """A call that has been sent and has not ended.

    Attributes:
        method: Name of its method in the proto.
        step: Number of the step that it belongs to.
    """

    method: str
    step: int


@dataclass(frozen=True)
class RowDistribution:
    """Assignment of the rows of a call to the parts that its ranks receive.

    Attributes:
        order: Permutation of the input rows that is cut into consecutive parts [rows] int64.
        numbers: Number of each row in this order [rows] int64, by which the ranks assign rows to mini-batches: its
            position by cost (see `deal`), or else its index in the inputs.
        protocol: Transfer protocol that cuts the permuted rows into parts.
    """

    order: np.ndarray
    numbers: np.ndarray
    protocol: TransferProtocol

    def some(self, mesh: Mesh, first: int, rows: int) -> RowDistribution:
        """Returns the distribution of a slice of the input rows. Each row keeps its number and goes to the same ranks
        of `mesh` as in this distribution.

        Args:
            mesh: Mesh of the ranks.
            first: Index of the first row of the slice in the inputs.
            rows: Number of rows in the slice.
        """
        distribution = self.protocol.distribute(len(self.order), mesh)
        places = {self.protocol.part(rank, mesh): mine for rank, mine in enumerate(distribution)}
        parts = [places[part] for part in sorted(places)]
        kept = [part[(self.order[part] >= first) & (self.order[part] < first + rows)] for part in parts]
        taken, sizes = np.concatenate(kept), np.array([len(part) for part in kept])
        return RowDistribution(
            self.order[taken] - first, self.numbers[taken], WholeGroups(self.protocol, sizes)
        )


@dataclass(frozen=True)
class GroupCall:
    """A call of a method on all ranks of a role group; `run` executes it.

    Attributes:
        callee: The ranks that are called.
        method: The method.
        header: Header of the requests; sequence number, epoch and start of the session are set when the call is sent.
        inputs: Columns that the method reads.
        options: Further fields of the request, by name.
        step: The step that the call belongs to.
        place: Place of the call in the order of calls on its devices.
        beside: Whether the ranks execute the call concurrently with ordered calls.
        moved: Futures of the calls that offload and onload services before this one. Where one fails, this one fails
            with its error and is not sent.
        first_row: Number of its first row among those of all chunks; see `RoleGroup.call`.
        within: Columns of a later call whose rows include the rows of this call. Each row then goes to the ranks that
            the later call will send it to. Default: the rows are distributed on their own.
        replacement: Replacement of the service, where one that is lost is replaced. Default: it is not.
    """

    callee: Callee
    method: Method
    header: common_pb2.Call
    inputs: FutureBatch
    options: dict[str, Any]
    step: StepContext
    place: Place
    moved: Sequence[Future[tuple[Batch, CallRecord]]] = ()
    first_row: int = 0
    beside: bool = False
    within: FutureBatch | None = None
    replacement: Replacement | None = None

    async def run(self, running: dict[str, RunningCall]) -> tuple[Batch, CallRecord]:
        """Executes the call: waits for its inputs and its place, sends the requests and waits for the responses.

        Args:
            running: Running calls by call id. The call adds itself when it is sent, and removes itself at its end.

        Returns:
            The rows that the ranks made, in the order of the inputs, and the record of the call.

        Raises:
            RlhfError: A rank failed or did not respond in time, or the call waited longer than `place.patience_s` for
                its inputs and its place, before it was sent.
        """
        try:
            if self.replacement is None:
                return await self._answered(running, *await self._turn())
            return await self._answered_at_last(running, self.replacement)
        finally:
            self.place.leave()

    async def _answered_at_last(
        self, running: dict[str, RunningCall], replacement: Replacement
    ) -> tuple[Batch, CallRecord]:
        """Executes the call, and sends it again where its service is lost and replaced. Returns and raises as `run`; it
        raises LostAgain where the service is lost too often."""
        losses = 0
        while True:
            turn = await self._turn()
            await replacement.ready()
            number = replacement.number
            try:
                return await self._answered(running, *turn)
            except RlhfError as error:
                losses += 1
                self.place.was_lost()
                name, step = self.method.snake_name, self.step
                if await replacement.after(error, name, step.number, number, losses):
                    step.note(f"{RESTARTS}{self.callee.name}", 1)
                if self.callee.description.epoch:
                    # By its id, ranks that were not started again know the call as one that was stopped.
                    self.header.call_id = self.callee.session.new_call_id()

    async def _answered(
        self, running: dict[str, RunningCall], distribution: RowDistribution, parts: Sequence[BatchPart]
    ) -> tuple[Batch, CallRecord]:
        """Sends the requests and waits for the responses; the rest as of `run`."""
        call_id, ranks = self.header.call_id, self.callee.ranks
        ranks.address(self.header, self.callee.session.claimed_unix_ns, beside=self.beside)
        requests = self._requests(parts, distribution.numbers)
        running[call_id] = RunningCall(self.method.name, self.step.number)
        started = self.callee.session.now()
        timeout_s = self.callee.session.time_of(self.method.snake_name)
        try:
            responses = await ranks.send(
                self.method, call_id, requests, timeout_s, self.place.was_sent, beside=self.beside
            )
        finally:
            running.pop(call_id, None)
        return self._collected(distribution, parts, responses), self._record(responses, started)

    @property
    def _protocol(self) -> TransferProtocol:
        return protocol_of(self.method)

    async def _turn(self) -> tuple[RowDistribution, list[BatchPart]]:
        """Waits until the input columns are resolved and the call may be sent. Returns the distribution of its rows and
        its parts.

        Raises:
            DeadlineExceeded: The wait took longer than `place.patience_s`, the longest time that all calls before
                this one may take.
        """
        names = list(self.inputs.columns)
        try:
            async with asyncio.timeout(self.place.patience_s) as patience:
                columns = await awaited(self.inputs.columns[name] for name in names)
                batch = Batch(self.inputs.rows, dict(zip(names, columns, strict=True)))
                distribution = await self._distribute_within() if self.within else self._distribute(batch)
                parts = await self._parts(batch.take(distribution.order), distribution.protocol)
                await awaited([*self.moved, *self.place.first])
        except TimeoutError as error:
            if not patience.expired():
                raise
            missing = [name for name, column in self.inputs.columns.items() if not column.done()]
            awaiting = f"columns {missing}" if missing else "the calls before it on its devices to end"
            raise DeadlineExceeded(
                f"{self.callee.name}.{self.method.snake_name} waited {self.place.patience_s:g} s for {awaiting}, which "
                "is longer than all calls before it may take"
            ) from error
        return distribution, parts

    async def _distribute_within(self) -> RowDistribution:
        """Returns the part of the later call's distribution that belongs to the rows of this call. Waits for the
        lengths of the later call's rows."""
        assert self.within is not None, "there is a later call"
        names = [name for name in LENGTHS_OF if name in self.within]
        columns = await awaited(self.within[name] for name in names)
        whole = self._distribute(Batch(self.within.rows, dict(zip(names, columns, strict=True))))
        return whole.some(self.callee.mesh, self.first_row, self.inputs.rows)

    def _distribute(self, batch: Batch) -> RowDistribution:
        """Returns the distribution of the rows: whole groups for a service that scores groups; balanced by cost (see
        `deal`) if the session balances and all lengths are known; otherwise the rows in input order."""
        rows, lengths, protocol = np.arange(batch.rows), _lengths(batch), self._protocol
        group = batch.columns.get("group") if self.callee.description.scores_groups else None
        if isinstance(group, LocalColumn):
            order, sizes = by_groups(np.asarray(group.values))
            return RowDistribution(order, order, WholeGroups(protocol, sizes))
        if not self.callee.session.balance or lengths is None or not protocol.splits or protocol.pads:
            return RowDistribution(rows, rows, protocol)
        block = max(self.options["schedule"].mini_batches, 1) if "schedule" in self.options else 1
        return RowDistribution(*deal(lengths, protocol.parts(self.callee.mesh), block), protocol)

    async def _parts(self, batch: Batch, protocol: TransferProtocol) -> list[BatchPart]:
        """Cuts the rows into parts by a transfer protocol; returns no part for a method without rows."""
        if not self.method.takes_rows:
            return []
        parts = cut(batch, protocol, self.callee.mesh)
        if not self.callee.description.dispatches:
            return parts
        session = self.callee.session
        return await share_columns(
            parts, self.callee.ranks.clients, session.name, self.step, session.timeout_s
        )

    def _requests(self, parts: Sequence[BatchPart], numbers: np.ndarray) -> list[bytes]:
        """Makes one serialized request per rank, in rank order, and adds the bytes of the columns that the controller
        holds to the step's count."""
        if not self.method.takes_rows:
            request = self.method.request(call=self.header, **self.options).SerializeToString()
            return [request] * len(self.callee.endpoints)

        def encode(part: BatchPart, relays: Sequence[Relay]) -> Any:
            rows = numbers[part.places] + (0 if self.within else self.first_row)
            return self.callee.codec.request(self.method, self.header, part.batch, rows, relays, self.options)

        self.step.count_bytes(sum(local_bytes(part.batch) * len(part.ranks) for part in parts))
        return serialized(parts, self.callee.endpoints, encode)

    def _collected(
        self, distribution: RowDistribution, parts: Sequence[BatchPart], responses: Sequence[Any]
    ) -> Batch:
        """Returns the rows that the ranks made, in the order of the inputs, and counts the bytes of columns in the
        responses themselves for the step. The batch is empty for a method without output columns."""
        protocol, mesh, rows = distribution.protocol, self.callee.mesh, len(distribution.order)
        if not (self.method.outputs and protocol.splits):
            return Batch(0, {})
        sizes = {rank: len(part.places) for part in parts for rank in part.ranks}
        collected = protocol.collect(mesh)
        made = self.callee.codec.rows_of(
            self.method, [responses[rank] for rank in collected], [sizes[rank] for rank in collected]
        )
        made = protocol.restore(made, rows, mesh)
        if made.rows == rows:
            made = made.take(np.argsort(distribution.order))
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
            ended_s=self.callee.session.now(),
            metrics=mean_over_ranks(collected),
            policy_version=responses[0].outcome.policy_version,
            responses=tuple(responses),
            parts=tuple(move.result()[1] for move in self.moved),
        )


def protocol_of(method: Method) -> TransferProtocol:
    """Returns the transfer protocol that a method declares."""
    return get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]


def _lengths(batch: Batch) -> np.ndarray | None:
    """Returns the number of tokens of each row, prompt and response together [rows] int64; None where the batch does
    not have columns prompt_ids and response_ids with known lengths."""
    columns = [batch.columns.get(name) for name in LENGTHS_OF]
    lengths = [column.lengths for column in columns if isinstance(column, RemoteColumn)]
    if len(lengths) < 2 or lengths[0] is None or lengths[1] is None:
        return None
    return lengths[0] + lengths[1]


def mean_over_ranks(responses: Sequence[Any]) -> dict[str, float]:
    """Returns the mean of each metric over the ranks' responses, weighted by the ranks' counts."""
    sums: dict[str, list[float]] = {}
    for response in responses:
        for name, mean in response.outcome.metrics.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += mean.sum
            entry[1] += mean.count
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}
