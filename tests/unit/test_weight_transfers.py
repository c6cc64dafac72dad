"""The calls that a transfer of weights is made of, on the side of the controller."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controller.role_groups.weights import run_together, sync_weights
from rlhf.errors import CallCancelled, DeadlineExceeded, PeerFailed, RlhfError, ServiceLost


def test_calls_that_were_all_cancelled_are_an_error_by_name() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def ended() -> None: ...

    for calls in ([cancelled, cancelled], [ended, cancelled]):
        with pytest.raises(CallCancelled, match="a call of the transfer of weights was cancelled"):
            asyncio.run(run_together([call() for call in calls]))


def test_the_error_is_that_of_the_rank_at_fault() -> None:
    async def fails(error: Exception) -> None:
        raise error

    lost, full = ServiceLost("rollout rank 1 is gone"), RlhfError("the arena is full")
    consequences = [PeerFailed("a peer failed"), CallCancelled("was cancelled"), DeadlineExceeded("waited")]
    for errors, culprit in (([*consequences, full], full), ([full, *consequences, lost], lost)):
        with pytest.raises(type(culprit), match=str(culprit)):
            asyncio.run(run_together([fails(error) for error in errors]))


def test_a_receiver_that_is_given_twice_is_an_error() -> None:
    actor, rollout = (SimpleNamespace(name=name, ranks=object()) for name in ("actor", "rollout"))
    receivers: list[Any] = [rollout, actor, rollout]
    with pytest.raises(ValueError, match="to: rollout is given more than once"):
        sync_weights(actor, receivers)  # type: ignore[arg-type]
