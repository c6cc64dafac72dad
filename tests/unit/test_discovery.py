"""Services are found when all of their ranks can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from controller.config.config import load
from controller.role_groups.discovery import Discovery
from rlhf.errors import ServiceLost
from rlhf.v1 import common_pb2, worker_pb2, worker_pb2_grpc

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
WAIT_S = 20.0


class Rank(worker_pb2_grpc.WorkerServiceServicer):
    """A rank of an actor of two, with an item in `asked` for each call of Describe."""

    def __init__(self, ports: list[int]) -> None:
        self.asked, self._ports = asyncio.Queue[None](), ports

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        self.asked.put_nowait(None)
        ends = (common_pb2.Endpoint(address=f"127.0.0.1:{port}") for port in self._ports)
        ranks = [worker_pb2.RankInfo(endpoint=end) for end in ends]
        return worker_pb2.DescribeResponse(role="actor", service="actor", epoch=7, ranks=ranks)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.asynccontextmanager
async def served(rank: Rank, port: int) -> AsyncIterator[None]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(rank, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def test_a_service_is_found_when_its_last_rank_can_be_reached() -> None:
    """Of a service that is about to end, rank 0 may respond longer than the others."""

    async def test() -> None:
        ports = free_ports(2)
        first, last = Rank(ports), Rank(ports)
        config = load(QUICKSTART, (f"services.actor.address=127.0.0.1:{ports[0]}",))
        discovery = Discovery(config, print)
        async with served(first, ports[0]):
            with pytest.raises(ServiceLost, match=rf": actor rank 1 .*:{ports[1]}\) cannot be reached"):
                await discovery.find("actor", time.monotonic() + 0.5)
            asked = first.asked.qsize()
            finding = asyncio.ensure_future(discovery.find("actor", time.monotonic() + WAIT_S))
            for _ in range(asked + 2):
                await first.asked.get()
            assert not finding.done()
            async with served(last, ports[1]):
                assert len((await finding).ranks) == 2
                await last.asked.get()

    asyncio.run(asyncio.wait_for(test(), 2 * WAIT_S))
