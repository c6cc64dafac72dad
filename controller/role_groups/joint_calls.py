"""Several calls on several groups that belong together, and their places in the order of calls on devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from client.session import StepContext
from controller.role_groups.dataflow import CallRecord
from controller.role_groups.futures import awaited
from controller.role_groups.placement import Place
from nccl_transfer.refs.batch import Batch
from rlhf.errors import DeadlineExceeded

SYNC = "sync_weights"
"""Method in the record of a whole transfer of weights."""


@dataclass(frozen=True)
class JointPlaces:
    """Places of several calls that belong together, in the order of calls on their devices.

    Attributes:
        held: Place of the calls that are made first. Later calls on its devices wait until it is left.
        later: Place of the last call of each group that has one of its own, behind, by name of the group.
        first: Futures that must be resolved before the calls are made, beside those of `held`.
    """

    held: Place
    later: Mapping[str, Place]
    first: Sequence[Future[Any]]


JointCalls = Callable[[StepContext, JointPlaces], Coroutine[Any, Any, CallRecord]]
"""Coroutine function that makes calls of a step at their places, and returns the record of the whole."""


async def in_places(
    places: JointPlaces,
    moved: Sequence[Future[tuple[Batch, CallRecord]]],
    calls: JointCalls,
    step: StepContext,
) -> CallRecord:
    """Waits until it is the turn of `places.held`, makes the calls, and leaves all places. `moved`: as of a
    `GroupCall`. Raises DeadlineExceeded where the calls before take longer than they may."""
    patience_s = places.held.patience_s
    try:
        try:
            async with asyncio.timeout(patience_s):
                moves = await awaited([*moved, *places.held.first, *places.first])
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"waited {patience_s:g} s for the calls before on the same devices to end"
            ) from error
        places.held.was_sent()
        whole = await calls(step, places)
        return replace(whole, parts=(*(record for _, record in moves[: len(moved)]), *whole.parts))
    finally:
        for place in (places.held, *places.later.values()):
            place.leave()
