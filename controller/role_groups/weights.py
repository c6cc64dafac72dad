"""Moves weights from the ranks of one service to those of others, as one call of several methods: both sides describe
what they hold and want, the source sends while the receivers load, and then the receivers commit."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from client.fanout import blame
from client.session import StepContext
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.group import LATE_S, RoleGroup
from controller.role_groups.joint_calls import SYNC, JointPlaces
from rlhf.errors import CallCancelled
from rlhf.v1 import weights_pb2

T = TypeVar("T")

SETTLE_S = 5.0
"""Time, in seconds, that the other side of a transfer has to end after one side has failed, before it is asked to stop:
it may know the cause."""
STAGES = ("describe_weights", "send_weights", "commit_weights")
"""Methods whose times add up to the longest time of a transfer."""
PARTS = ("send_weights", "load_weights", "commit_weights")
"""Methods of the calls that a transfer is made of, whose times are part of that of SYNC."""


def sync_weights(
    source: RoleGroup,
    receivers: Sequence[RoleGroup],
    bucket_bytes: int = 0,
    step: StepContext | None = None,
) -> FutureBatch:
    """Starts a transfer of the source's weights to all ranks of the receivers, and returns without waiting. The
    transfer has one place in the order of calls, on the devices of the source and the receivers; with `run.ahead` it
    enters the order with the updates of its step. If all receivers load weights concurrently with ordered calls, it
    occupies only the devices of the source, and CommitWeights has a separate place on the devices of each receiver, so
    that earlier calls on rows may run during the transfer.

    Args:
        source: Group whose ranks have a training engine.
        receivers: Groups of the role rollout, or values for a critic. One of the source's own ranks takes no part: they
            generate with the weights that they train.
        bucket_bytes: Most bytes of weights that move at a time; see WeightTransfer. 0: its default.
        step: The step that it belongs to. Default: the one begun last.

    Returns:
        A batch without rows, whose record is that of the whole transfer, with metrics weights_bytes (received by all
        ranks), weights_seconds (the transfer and its commits, without their waits for other calls) and
        weights_gb_per_s, and with the calls that moved weights as its parts.

    Raises:
        ValueError: A receiver is given more than once.
    """
    names = [group.name for group in receivers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"to: {', '.join(twice)} is given more than once")
    others = [group for group in receivers if group.ranks is not source.ranks]
    beside = all(group.runs_beside("load_weights") for group in others)
    longest_s = sum(2 * source.session.time_of(name) + LATE_S + SETTLE_S for name in STAGES)

    async def transfer(step: StepContext, places: JointPlaces) -> CallRecord:
        return await _transfer(source, others, step, bucket_bytes, places)

    return source.call_with(others, transfer, longest_s, step, beside=beside)


async def _transfer(
    source: RoleGroup, others: Sequence[RoleGroup], step: StepContext, bucket_bytes: int, places: JointPlaces
) -> CallRecord:
    """Makes the calls of a transfer. Returns the record of the whole, which ends when `places.held` is left; its parts
    are those of the calls that moved weights."""
    beside, started = bool(places.later), source.session.now()
    describes = [group.call_within("describe_weights", step, beside=beside) for group in others]
    described = await run_together([source.call_within("describe_weights", step), *describes])
    state_ids = {response.outcome.state_id for response in described[0].responses}
    held = state_ids.pop() if len(state_ids) == 1 else ""
    lacking = [
        (group, record)
        for group, record in zip(others, described[1:], strict=True)
        if any(_lacks(response, held) for response in record.responses)
    ]
    if not lacking:
        return _summary(source, described[0], (started, source.session.now()), 0)
    message = _message(source, described[0], held, lacking, bucket_bytes)
    state_id = described[0].responses[0].outcome.state_id
    loads = [
        group.call_within("load_weights", step, beside=beside, transfer=message, state_id=state_id)
        for group, _ in lacking
    ]
    moved = await run_together([source.call_within("send_weights", step, transfer=message), *loads])
    ended = source.session.now()
    if beside:
        places.held.leave()
    commits = [
        group.call_within("commit_weights", step, places.later.get(group.name), transfer=message.id)
        for group, _ in lacking
    ]
    committed = await run_together(commits)
    received = sum(response.received_bytes for record in moved[1:] for response in record.responses)
    ended = ended if beside else source.session.now()
    return _summary(source, described[0], (started, ended), received, (*moved, *committed))


def _message(
    source: RoleGroup,
    described: CallRecord,
    held: str,
    lacking: Sequence[tuple[RoleGroup, CallRecord]],
    bucket_bytes: int,
) -> weights_pb2.WeightTransfer:
    """Builds the message that all ranks receive from the descriptions of both sides.

    Args:
        source, described: The source, and the record of its DescribeWeights.
        held: As for `_lacks`.
        lacking: The receivers of which a rank lacks weights, with their records.
        bucket_bytes: As in the message.
    """
    receivers = [
        _rank_weights(group, rank, response.slices if _lacks(response, held) else ())
        for group, record in lacking
        for rank, response in enumerate(record.responses)
    ]
    return weights_pb2.WeightTransfer(
        id=uuid.uuid4().hex,
        policy_version=described.policy_version,
        bucket_bytes=bucket_bytes,
        sources=[
            _rank_weights(source, rank, response.slices) for rank, response in enumerate(described.responses)
        ],
        receivers=receivers,
    )


def _rank_weights(group: RoleGroup, rank: int, slices: Any) -> weights_pb2.RankWeights:
    return weights_pb2.RankWeights(endpoint=group.description.ranks[rank].endpoint, slices=slices)


def _lacks(response: Any, held: str) -> bool:
    """Returns whether a rank that has answered DescribeWeights has other weights than the source, whose ranks are all
    in the state with the id `held`; empty where they are not in one, and every rank lacks weights."""
    return not held or response.outcome.state_id != held


def _summary(
    source: RoleGroup,
    described: CallRecord,
    times: tuple[float, float],
    received: int,
    parts: tuple[CallRecord, ...] = (),
) -> CallRecord:
    """Returns the record of a transfer from `times[0]` to `times[1]`, Unix times in seconds. The longest commit after
    that counts in its metric weights_seconds too."""
    started, ended = times
    commits = [part for part in parts if part.method == "commit_weights" and part.started_s >= ended]
    seconds = max(ended - started, 1e-9) + max(
        (each.ended_s - each.started_s for each in commits), default=0.0
    )
    metrics = {
        "weights_bytes": float(received),
        "weights_seconds": seconds,
        "weights_gb_per_s": received / seconds / 1e9,
    }
    return CallRecord(source.name, SYNC, started, ended, metrics, described.policy_version, (), parts)


async def run_together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls concurrently and returns their results in order. If a call fails, the other calls have SETTLE_S to end
    and are then cancelled. Raises the error with the lowest `blame`; CallCancelled if all calls that did not succeed
    were cancelled by the caller."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=SETTLE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
    if errors:
        raise min(errors, key=blame)
    if any(task.cancelled() for task in tasks):
        raise CallCancelled("a call of the transfer of weights was cancelled")
    return [task.result() for task in tasks]
