"""Role groups: all ranks of one service, called as one (HybridFlow, section 4).

A call selects the columns its proto declares, distributes the rows by the method's transfer protocol, sends one
request to each rank, and collects references to what the ranks made. Tensors stay where they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from client.outage import is_silence
from client.rank import WORKER, RankClient
from client.session import Session, StepContext
from controller.role_groups.balance import cost_of, dealt, ranked
from controller.role_groups.dataflow import (
    CallRecord,
    FutureBatch,
    Loop,
    Place,
    Placement,
    all_of,
    awaited,
    then,
)
from controller.role_groups.requests import BatchPart, cut, local_bytes, serialized, share_columns
from controller.role_groups.verdicts import all_scored, failure_of, rewards_of, text_rows
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.plans import Relay
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, mesh_from_proto
from rlhf.contract import Method, group_methods
from rlhf.errors import (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    RewardFailed,
    RlhfError,
    ServiceLost,
)
from rlhf.v1 import actor_pb2, common_pb2, critic_pb2, worker_pb2

SETTLE_S = 2.0
"""After a rank has failed, how long to wait for what the others say: the culprit may answer last."""
LATE_S = 15.0
"""How long a call may go on past its time: its outcome is asked for, other ranks are stopped and listened to."""
INTRODUCE_S = 60.0
"""How long every rank may take to be told of the others, which it is once in a session."""


@dataclass
class RankQueue:
    """The session's calls on the ranks of a service, which run them in the order of their sequence numbers.

    Attributes:
        sent: Number of calls that the ranks have been sent.
        under_way: When calls are due that have not been answered, by call id, in the event loop's time.
    """

    sent: int = 0
    under_way: dict[str, float] = field(default_factory=dict)

    def time_for(self, timeout_s: float) -> float:
        """Seconds until a call that is sent now is due: its own time begins when those before it are due."""
        now = asyncio.get_running_loop().time()
        return max([now, *self.under_way.values()]) - now + timeout_s


class RoleGroup:
    """All ranks of one service.

    Args:
        clients: One per rank, in rank order.
        description: What rank 0 said of the service.
        devices: Devices it runs on; calls on common devices take turns.
    """

    def __init__(
        self,
        clients: Sequence[RankClient],
        description: worker_pb2.DescribeResponse,
        devices: frozenset[str],
        session: Session,
        placement: Placement,
        loop: Loop,
    ) -> None:
        self.name = clients[0].service
        self.clients = clients
        self.description = description
        self.mesh = mesh_from_proto(description.mesh)
        self.endpoints = [endpoint_from_proto(rank.endpoint) for rank in description.ranks]
        self.session = session
        self.running: dict[str, str] = {}
        self._devices = devices
        self._placement = placement
        self._loop = loop
        self._queue = RankQueue()
        self._methods = group_methods(description.role)

    def second_role(self, role: str) -> RoleGroup:
        """A role that the same ranks serve beside their own, as a group named like it. The ranks have one queue, so
        the calls of both are numbered through."""
        description = worker_pb2.DescribeResponse()
        description.CopyFrom(self.description)
        description.role = role
        group = GROUPS[role](
            self.clients, description, self._devices, self.session, self._placement, self._loop
        )
        group.name, group._queue = role, self._queue
        return group

    def call(
        self,
        name: str,
        batch: FutureBatch | None = None,
        outputs: Sequence[str] | None = None,
        **options: Any,
    ) -> FutureBatch:
        """Calls a method on all ranks, once its inputs are there and its devices are free.

        Args:
            name: Python name of the method.
            batch: Rows; only the columns the method declares travel.
            outputs: Columns to expect, where not all that the method declares.
            options: Further fields of the request.

        Returns:
            The rows it makes, at once.

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
        place = self._placement.enter(self._devices, self._queue, 2 * self.session.time_of(name) + LATE_S)
        result = self._loop.start(self._run(method, inputs, header, step, options, place))
        step.made(result)
        expected = method.outputs if outputs is None else outputs
        columns = {column: _column_of(result, column) for column in expected}
        return FutureBatch(batch.rows, columns, (_record_of(result),), batch.step)

    async def _run(
        self,
        method: Method,
        inputs: FutureBatch,
        header: common_pb2.Call,
        step: StepContext,
        options: dict[str, Any],
        place: Place,
    ) -> tuple[Batch, CallRecord]:
        try:
            order, numbers, parts = await self._turn(method, inputs, step, options, place)
            header.sequence, header.epoch = self._queue.sent + 1, self.description.epoch
            requests = self._requests(method, parts, numbers, header, step, options)
            self.running[header.call_id] = method.name
            started = time.time()
            responses = await self._send(method, header.call_id, requests, place)
            return self._collect(method, order, responses, step, started)
        finally:
            self.running.pop(header.call_id, None)
            self._queue.under_way.pop(header.call_id, None)
            place.leave()

    async def _turn(
        self, method: Method, inputs: FutureBatch, step: StepContext, options: dict[str, Any], place: Place
    ) -> tuple[np.ndarray, np.ndarray, list[BatchPart]]:
        """Waits until the call may be sent; returns the order and the numbers of its rows, and its parts.

        Raises:
            DeadlineExceeded: It waits for longer than all that it waits for may take.
        """
        try:
            async with asyncio.timeout(place.patience_s) as patience:
                names = list(inputs.columns)
                columns = await awaited(inputs.columns[name] for name in names)
                batch = Batch(inputs.rows, dict(zip(names, columns, strict=True)))
                order, numbers = self._dealt(method, batch, options)
                parts = await self._parts(method, batch.take(order), step)
                await awaited(place.first)
        except TimeoutError as error:
            if not patience.expired():
                raise
            missing = [name for name, column in inputs.columns.items() if not column.done()]
            what = f"columns {missing}" if missing else "the calls before it on its devices to end"
            raise DeadlineExceeded(
                f"{self.name}.{method.snake_name} waited {place.patience_s:g} s for {what}, which is longer than all "
                "calls before it may take"
            ) from error
        return order, numbers, parts

    def _dealt(self, method: Method, batch: Batch, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The rows in the order in which the transfer protocol cuts them into parts, and the numbers they go by there.

        Sequences whose lengths are known are dealt out by cost. Their numbers are then their ranks by cost, whatever
        the mesh, and each part has whole blocks of them: so every mini-batch, which gets one of each block, has
        sequences of all lengths, and every data rank a like share of it.
        """
        protocol = get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]
        rows, lengths = np.arange(batch.rows), _lengths(batch)
        if not self.session.balance or lengths is None or not protocol.splits or protocol.pads:
            return rows, rows
        costs = cost_of(lengths)
        by_cost = ranked(costs)
        block = max(options["schedule"].mini_batches, 1) if "schedule" in options else 1
        parts = dealt(costs[by_cost], protocol.parts(self.mesh), block)
        # Within a part rows stay as they were: those that lie side by side are read in one piece.
        numbers = np.concatenate([part[np.argsort(by_cost[part])] for part in parts])
        return by_cost[numbers], numbers

    async def _parts(self, method: Method, batch: Batch, step: StepContext) -> list[BatchPart]:
        """The rows of each part, by the method's transfer protocol; none of a method that takes no rows."""
        if not method.takes_rows:
            return []
        parts = cut(batch, get_protocol(method.spec.transfer_protocol), self.mesh)  # type: ignore[union-attr]
        if not self.description.dispatches:
            return parts
        return await share_columns(parts, self.clients, self.session.name, step, self.session.timeout_s)

    def _requests(
        self,
        method: Method,
        parts: Sequence[BatchPart],
        numbers: np.ndarray,
        header: common_pb2.Call,
        step: StepContext,
        options: dict[str, Any],
    ) -> list[bytes]:
        """One serialized request per rank."""
        if not method.takes_rows:
            return [method.request(call=header, **options).SerializeToString()] * len(self.clients)

        def encode(part: BatchPart, relays: Sequence[Relay]) -> Any:
            return self._request(method, part, numbers[part.places], relays, header, options)

        step.count_bytes(sum(local_bytes(part.batch) * len(part.ranks) for part in parts))
        return serialized(parts, self.endpoints, encode)

    def _request(
        self,
        method: Method,
        part: BatchPart,
        rows: np.ndarray,
        relays: Sequence[Relay],
        header: common_pb2.Call,
        options: dict[str, Any],
    ) -> Any:
        """The request of the ranks of a part; `rows` are the numbers of its rows."""
        return method.request(call=header, batch=wire.to_proto(part.batch, rows, relays), **options)

    async def _send(self, method: Method, call_id: str, requests: list[bytes], place: Place) -> list[Any]:
        """Sends each rank its request; if one fails, stops the others and raises what the culprit said."""
        timeout_s = self._queue.time_for(self.session.time_of(method.snake_name))
        self._queue.under_way[call_id] = asyncio.get_running_loop().time() + timeout_s
        self._queue.sent += 1
        calls: list[asyncio.Future[Any]] = []
        try:
            for client, request in zip(self.clients, requests, strict=True):
                calls.append(client.start(method, request, timeout_s))
            place.was_sent()
            silent: list[RankClient] = []
            done, pending = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending and not any(call.exception() for call in done):
                # It is late. Ranks that answer Cancel will say what became of the call; one that does not is to blame.
                silent = await self._cancel(call_id)
                done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if not any(call.exception() for call in done):
                return [call.result() for call in calls]
            silent = silent or await self._cancel(call_id)
            await asyncio.wait(calls, timeout=SETTLE_S)
        except BaseException:
            await self._cancel(call_id)
            raise
        finally:
            for call in calls:
                call.cancel()
        # Of those that are equally close to the cause, one that failed first; of these, the lowest rank.
        in_order = sorted(calls, key=lambda call: call in pending)
        ended = [call for call in in_order if call.done() and not call.cancelled()]
        error = min((e for call in ended if (e := call.exception())), key=_blame)
        if silent and isinstance(error, DeadlineExceeded | PeerFailed | CallCancelled):
            raise DeadlineExceeded(
                f"{silent[0]} {method.name}: no answer within {timeout_s:g} s, and none to Cancel: its process "
                "is stopped or stuck"
            ) from error
        raise error

    async def cancel_all(self) -> None:
        """Asks the calls that are running to stop."""
        await asyncio.gather(*(self._cancel(call_id) for call_id in list(self.running)))

    async def _cancel(self, call_id: str) -> list[RankClient]:
        """Asks every rank to stop a call; returns those that do not answer, as a rank at work does at once."""
        request = worker_pb2.CancelRequest(call_id=call_id)
        cancels = (client.call(WORKER["Cancel"], request, SETTLE_S) for client in self.clients)
        answers = await asyncio.gather(*cancels, return_exceptions=True)
        answered = zip(self.clients, answers, strict=True)
        return [client for client, answer in answered if _is_silent(answer)]

    def _collect(
        self, method: Method, order: np.ndarray, responses: list[Any], step: StepContext, started: float
    ) -> tuple[Batch, CallRecord]:
        protocol = get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]
        collected = [responses[rank] for rank in protocol.collect(self.mesh)]
        made = Batch(0, {})
        if method.outputs and protocol.splits:
            made = protocol.restore(self._made(method, collected, len(order)), len(order), self.mesh)
            if made.rows == len(order):
                made = made.take(np.argsort(order))
            step.count_bytes(local_bytes(made))
        record = CallRecord(
            service=self.name,
            method=method.snake_name,
            started_s=started + self._queued_s(responses),
            ended_s=time.time(),
            metrics=_merge_metrics(collected),
            policy_version=responses[0].outcome.policy_version,
            responses=tuple(responses),
        )
        return made, record

    def _queued_s(self, responses: Sequence[Any]) -> float:
        """How long every rank was at earlier calls; a server of another package has no queue of ours."""
        if not self.description.epoch:
            return 0.0
        return min(response.outcome.timing.queue_s for response in responses)

    def _made(self, method: Method, collected: list[Any], rows: int) -> Batch:
        if not method.outputs:
            return Batch(0, {})
        return Batch.concat([batch for r in collected if (batch := wire.from_proto(r.batch)).columns])

    def release(self, step: StepContext) -> Future[None]:
        """Frees the rows that a step's calls have made, on every rank."""
        request = worker_pb2.ReleaseRequest(session=self.session.name, steps=[step.number])
        return self._ask_all(WORKER["Release"], request, self.session.timeout_s)

    def introduce(self, request: bytes) -> Future[None]:
        """Tells every rank which ranks take part in the session.

        Args:
            request: An IntroduceRequest, serialized.
        """
        return self._ask_all(WORKER["Introduce"], request, INTRODUCE_S)

    def _ask_all(self, method: Method, request: Any, timeout_s: float) -> Future[None]:
        """A unary call to every rank, which may be made again."""

        async def run() -> None:
            calls = (client.reach(method, request, timeout_s) for client in self.clients)
            await asyncio.gather(*calls)

        return self._loop.start(run())

    def begin_session(self, keep_weights: bool, directories: Sequence[str] = ()) -> FutureBatch:
        """Begins from the model directory, or from the weights that the session before left; `directories` are to be
        written later."""
        return self.call("begin_session", keep_weights=keep_weights, directories=directories)

    def synchronize(self) -> FutureBatch:
        """A fence: done when every earlier call of the group is."""
        return self.call("synchronize")

    def offload(self) -> FutureBatch:
        """Moves weights and optimizer state off the devices."""
        return self.call("offload")

    def onload(self) -> FutureBatch:
        """Brings them back."""
        return self.call("onload")

    def save_checkpoint(self, directory: str, format: worker_pb2.CheckpointFormat) -> FutureBatch:
        """Writes weights, or weights and optimizer state, on the ranks' hosts."""
        return self.call("save_checkpoint", directory=directory, format=format)

    def load_checkpoint(self, directory: str) -> FutureBatch:
        """Reads a sharded checkpoint back."""
        return self.call("load_checkpoint", directory=directory)

    def profile(self, directory: str, calls: int) -> FutureBatch:
        """Traces the next calls of every rank."""
        return self.call("profile", directory=directory, calls=calls)


class ActorGroup(RoleGroup):
    """The policy."""

    def generate_sequences(
        self, prompts: FutureBatch, sampling: actor_pb2.Sampling, *, return_text: bool = False
    ) -> FutureBatch:
        """One response per row of column "prompt": prompt_ids, response_ids, rollout_log_probs, and response
        where text is asked for."""
        outputs = ["prompt_ids", "response_ids", "rollout_log_probs", *(["response"] if return_text else [])]
        return self.call("generate_sequences", prompts, outputs, sampling=sampling, return_text=return_text)

    def compute_log_prob(self, batch: FutureBatch, temperature: float) -> FutureBatch:
        """log_probs: of each response token under the current weights."""
        return self.call("compute_log_prob", batch, temperature=temperature)

    def compute_loss(self, batch: FutureBatch) -> FutureBatch:
        """pretrain_loss of column "text"."""
        return self.call("compute_loss", batch)

    def update_actor(
        self, batch: FutureBatch, loss: actor_pb2.PolicyLoss, schedule: actor_pb2.Schedule, temperature: float
    ) -> FutureBatch:
        """All epochs and mini-batches, or nothing."""
        return self.call("update_actor", batch, loss=loss, schedule=schedule, temperature=temperature)

    def tokenize(self, rows: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """prompt_ids and response_ids of columns "prompt" and "response"."""
        return self.call("tokenize", rows, max_response_tokens=max_response_tokens)

    def update_supervised(self, batch: FutureBatch, schedule: actor_pb2.Schedule) -> FutureBatch:
        """All epochs and mini-batches on the responses as they are, or nothing."""
        return self.call("update_supervised", batch, schedule=schedule)


class CriticGroup(RoleGroup):
    """A value model."""

    def compute_values(self, batch: FutureBatch) -> FutureBatch:
        """values: of the state in which each response token was chosen."""
        return self.call("compute_values", batch)

    def update_critic(
        self, batch: FutureBatch, loss: critic_pb2.ValueLoss, schedule: actor_pb2.Schedule
    ) -> FutureBatch:
        """All epochs and mini-batches, or nothing."""
        return self.call("update_critic", batch, loss=loss, schedule=schedule)


class ReferenceGroup(RoleGroup):
    """The frozen policy."""

    def compute_ref_log_prob(self, batch: FutureBatch, temperature: float) -> FutureBatch:
        """ref_log_probs: of each response token under the reference weights."""
        return self.call("compute_ref_log_prob", batch, temperature=temperature)


class RewardGroup(RoleGroup):
    """A reward or cost, in whatever language it is written."""

    TEXT = ("prompt", "response", "ground_truth", "metadata")
    TENSORS = ("prompt_ids", "response_ids")

    @property
    def wants_text(self) -> bool:
        """Whether it scores text; any service that does not say otherwise does."""
        return self.description.input_form != worker_pb2.INPUT_FORM_TENSOR

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        """rewards: one per row [rows] float64, or one per response token (jagged).

        Raises (when resolved):
            RewardFailed: Rows that could not be scored, with the cause of the first.
        """
        tried = self.try_reward(batch)
        both = all_of([tried["rewards"], tried["reward_errors"]])
        rewards = then(both, lambda columns: all_scored(columns[0], columns[1], self.name))
        return FutureBatch(batch.rows, {"rewards": rewards}, tried.calls, batch.step)

    def try_reward(self, batch: FutureBatch) -> FutureBatch:
        """rewards, as `compute_reward`, and reward_errors: why a row could not be scored, empty where it was. The
        reward of a row that was not scored means nothing."""
        names = self.TEXT if self.wants_text else self.TENSORS
        needed = ("response",) if self.wants_text else self.TENSORS
        missing = [name for name in needed if name not in batch]
        if missing:
            raise InvalidRequest(
                f"{self.name}.compute_reward needs columns {missing}; the batch has {sorted(batch.columns)}"
            )
        rows = batch.select([name for name in names if name in batch])
        return self.call("compute_reward", rows, ("rewards", "reward_errors"))

    def compare_pairs(self, pairs: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """chosen_scores and rejected_scores, of a reward that learns."""
        return self.call("compare_pairs", pairs, max_response_tokens=max_response_tokens)

    def update_reward(
        self, pairs: FutureBatch, loss: str, schedule: actor_pb2.Schedule, max_response_tokens: int
    ) -> FutureBatch:
        """All epochs and mini-batches on pairs, or nothing."""
        return self.call(
            "update_reward",
            pairs,
            loss=loss,
            epochs=schedule.epochs,
            mini_batches=schedule.mini_batches,
            max_response_tokens=max_response_tokens,
        )

    def _request(
        self,
        method: Method,
        part: BatchPart,
        rows: np.ndarray,
        relays: Sequence[Relay],
        header: common_pb2.Call,
        options: dict[str, Any],
    ) -> Any:
        if not self.wants_text or method.name != "ComputeReward":
            return super()._request(method, part, rows, relays, header, options)
        return method.request(call=header, text_rows=text_rows(part.batch), **options)

    def _made(self, method: Method, collected: list[Any], rows: int) -> Batch:
        if method.name != "ComputeReward":
            return super()._made(method, collected, rows)
        parts = get_protocol(method.spec.transfer_protocol).distribute(rows, self.mesh)  # type: ignore[union-attr]
        for client, part, response in zip(self.clients, parts, collected, strict=True):
            if len(response.scores) != len(part):
                raise RewardFailed(f"{client}: {len(response.scores)} verdicts for {len(part)} rows")
        scores = [score for response in collected for score in response.scores]
        batch = Batch(len(scores), {"rewards": LocalColumn(rewards_of(scores, self.name))})
        errors = LocalColumn([failure_of(score) for score in scores])
        return Batch(len(scores), {**batch.columns, "reward_errors": errors})


def _lengths(batch: Batch) -> np.ndarray | None:
    """Tokens of each row's sequence; None where the batch does not have them."""
    columns = [batch.columns.get(name) for name in ("prompt_ids", "response_ids")]
    lengths = [column.lengths for column in columns if isinstance(column, RemoteColumn)]
    if len(lengths) < 2 or lengths[0] is None or lengths[1] is None:
        return None
    return lengths[0] + lengths[1]


def _merge_metrics(responses: Sequence[Any]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for response in responses:
        for name, mean in response.outcome.metrics.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += mean.sum
            entry[1] += mean.count
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}


def _blame(error: BaseException) -> int:
    """Order of errors by how close they are to the cause: a lost rank, then any failure of its own, then
    those that only say that another failed."""
    if isinstance(error, ServiceLost):
        return 0
    if isinstance(error, PeerFailed | CallCancelled):
        return 3
    if isinstance(error, DeadlineExceeded):
        return 2
    return 1 if isinstance(error, RlhfError) else 4


def _column_of(result: Future[tuple[Batch, CallRecord]], name: str) -> Future[Column]:
    return then(result, lambda made: made[0][name])


def _record_of(result: Future[tuple[Batch, CallRecord]]) -> Future[CallRecord]:
    return then(result, lambda made: made[1])


GROUPS: dict[str, type[RoleGroup]] = {
    "actor": ActorGroup,
    "critic": CriticGroup,
    "reference": ReferenceGroup,
    "reward": RewardGroup,
}


def _is_silent(answer: Any) -> bool:
    """Whether a rank has not answered, be it in time or to the pings of its connection."""
    if isinstance(answer, ServiceLost) and isinstance(answer.__cause__, grpc.RpcError):
        return is_silence(answer.__cause__)
    return isinstance(answer, DeadlineExceeded)
