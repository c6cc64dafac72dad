"""A caller of the load test ends its session on every rank."""

from __future__ import annotations

import asyncio

import grpc.aio

from loadtest.caller import Caller
from loadtest.target import Target
from rlhf.contract import SERVICES
from rlhf.v1 import worker_pb2, worker_pb2_grpc


class SlowRank(worker_pb2_grpc.WorkerServiceServicer):
    """A rank that takes 0.3 s to end a session."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def EndSession(
        self, request: worker_pb2.EndSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.EndSessionResponse:
        await asyncio.sleep(0.3)
        self.ended.append(request.session)
        return worker_pb2.EndSessionResponse()

    async def Synchronize(
        self, request: worker_pb2.SynchronizeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SynchronizeResponse:
        return worker_pb2.SynchronizeResponse()


async def call_and_lose_the_first_rank() -> list[str]:
    """Returns the sessions that the second rank has ended."""
    dying, rank = grpc.aio.server(), SlowRank()
    living = grpc.aio.server()
    ports = [server.add_insecure_port("127.0.0.1:0") for server in (dying, living)]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(SlowRank(), dying)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(rank, living)
    await asyncio.gather(dying.start(), living.start())
    addresses = [f"127.0.0.1:{port}" for port in ports]
    ranks = [worker_pb2.RankInfo(endpoint={"address": address}) for address in addresses]
    target = Target(addresses[0], "actor", 1, worker_pb2.DescribeResponse(role="actor", ranks=ranks))
    async with Caller(target, SERVICES["worker"]["Synchronize"], [[b"", b""]], 5.0):
        await dying.stop(None)
    await living.stop(None)
    return rank.ended


def test_a_rank_that_has_died_keeps_no_session_open_on_the_others() -> None:
    assert len(asyncio.run(call_and_lose_the_first_rank())) == 1
