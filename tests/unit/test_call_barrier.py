"""Ranks at their meeting before a call, with rounds that a test ends by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from client.fanout import FanOut
from client.rank import RankClient
from rlhf.contract import group_methods
from rlhf.errors import OutOfStep, PeerFailed, Refused
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.call_barrier import CallBarrier, note_of

METHOD = group_methods("reward")["offload"]


class HandRound:
    """A round that ends when the peer's note comes, or the group breaks."""

    def __init__(self, note: Sequence[float]) -> None:
        self.note = list(note)
        self.arrived: asyncio.Future[list[list[float]]] = asyncio.get_running_loop().create_future()

    async def arrive(self) -> list[list[float]]:
        return await self.arrived

    def end(self, peer: Sequence[float]) -> None:
        self.arrived.set_result([self.note, list(peer)])


class HandRanks:
    """Rank 0 of two; notes its rounds."""

    def __init__(self) -> None:
        self.rounds: list[HandRound] = []

    def begin_round(self, note: Sequence[float]) -> HandRound:
        self.rounds.append(HandRound(note))
        return self.rounds[-1]


def request(sequence: int) -> Any:
    return worker_pb2.OffloadRequest(call=common_pb2.Call(sequence=sequence))


async def meet(barrier: CallBarrier, sequence: int, within_s: float = 0.01) -> bool:
    note = note_of(METHOD, request(sequence))
    return await barrier.meet(note, asyncio.Event(), time.monotonic() + within_s) == note


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_rank_leaves_where_its_peers_broke_off_a_meeting_that_no_caller_waits_for() -> None:
    reasons: list[str] = []

    async def main() -> None:
        ranks = HandRanks()
        barrier = CallBarrier(cast(Any, ranks), reasons.append)
        assert not await meet(barrier, 1)
        ranks.rounds[0].arrived.set_exception(OutOfStep("a peer of rank 0 did not join a collective"))
        await soon()

    asyncio.run(main())
    assert reasons == ["a peer of rank 0 did not join a collective"]


def test_a_caller_that_waits_gets_the_error_itself() -> None:
    async def main() -> None:
        ranks = HandRanks()
        barrier = CallBarrier(cast(Any, ranks), lambda why: pytest.fail(why))
        meeting = asyncio.create_task(meet(barrier, 1, within_s=20))
        await soon()
        ranks.rounds[0].arrived.set_exception(OutOfStep("a peer of rank 0 did not join a collective"))
        with pytest.raises(OutOfStep):
            await meeting
        await soon()

    asyncio.run(main())


def test_of_calls_that_were_given_up_a_rank_attends_for_the_first_and_the_last() -> None:
    async def main() -> None:
        ranks = HandRanks()
        barrier = CallBarrier(cast(Any, ranks), lambda why: pytest.fail(why))
        for sequence in range(1, 20):
            assert not await meet(barrier, sequence)
        last = asyncio.create_task(meet(barrier, 20, within_s=20))
        await soon()
        assert len(barrier._entries) == 2
        peer = [0.0, 0.0, 20.0, *ranks.rounds[0].note[3:]]
        ranks.rounds[0].end(peer)
        await soon()
        ranks.rounds[1].end([1.0, 0.0])  # the peer wants its call, and this rank does not want its first
        await soon()
        assert len(ranks.rounds) == 3
        ranks.rounds[2].end(ranks.rounds[2].note)
        assert ranks.rounds[2].note[2] == 20.0
        assert await last

    asyncio.run(main())


def test_a_peer_at_a_call_before_one_that_was_given_up_is_told_at_once() -> None:
    async def main() -> None:
        ranks = HandRanks()
        barrier = CallBarrier(cast(Any, ranks), lambda why: pytest.fail(why))
        meeting = asyncio.create_task(meet(barrier, 3, within_s=20))
        await soon()
        ranks.rounds[0].end([0.0, 0.0, 5.0, *ranks.rounds[0].note[3:]])
        await soon()
        ranks.rounds[1].end([0.0, 0.0])
        with pytest.raises(
            PeerFailed, match="rank 1 has not received this call and is at a later call of the session"
        ):
            await meeting

    asyncio.run(main())


def test_a_session_that_begins_again_on_the_ranks_does_not_meet_its_calls_of_before() -> None:
    """One rank was cut off while its peer waited for it at call 5. The controller ends the session and begins it again,
    later, as the headers of its calls say."""

    async def main() -> None:
        ranks = HandRanks()
        fan_out = FanOut([cast(RankClient, SimpleNamespace(service="reward"))], 1)
        before, again = (common_pb2.Call(session="run") for _ in range(2))
        started = time.time_ns()
        fan_out.address(before, started)
        fan_out.renew(fan_out.clients, 1)
        fan_out.address(again, started)
        old, note = (note_of(METHOD, worker_pb2.OffloadRequest(call=each)) for each in (before, again))
        barrier = CallBarrier(cast(Any, ranks), lambda why: pytest.fail(why))
        meeting = asyncio.create_task(barrier.meet(note, asyncio.Event(), time.monotonic() + 20))
        await soon()
        ranks.rounds[0].end([*old[:2], 5.0, old[3]])
        await soon()
        ranks.rounds[1].end([0.0, 0.0])
        await soon()
        ranks.rounds[2].end(note)
        assert await meeting == note

    asyncio.run(main())


def test_a_call_whose_session_a_peer_has_left_is_refused() -> None:
    """A younger session may reach the peer first."""

    async def main() -> None:
        ranks = HandRanks()
        barrier = CallBarrier(cast(Any, ranks), lambda why: pytest.fail(why))
        meeting = asyncio.create_task(meet(barrier, 3, within_s=20))
        await soon()
        ranks.rounds[0].end([1.0, 0.0, 1.0, *ranks.rounds[0].note[3:]])
        await soon()
        ranks.rounds[1].end([1.0, 0.0])
        with pytest.raises(Refused, match="superseded: rank 1 is in a younger session"):
            await meeting

    asyncio.run(main())
