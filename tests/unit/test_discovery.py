"""Services are found when all of their ranks can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from controller.config.config import load
from controller.role_groups import discovery
from controller.role_groups.discovery import Discovery
from integration.harness import free_ports
from rlhf.errors import ServiceLost
from rlhf.v1 import common_pb2, worker_pb2, worker_pb2_grpc

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
WAIT_S = 20.0
ROLES = ("reward", "critic")


class Rank(worker_pb2_grpc.WorkerServiceServicer):
    """A rank of a service with ranks at these ports, with an item in `asked` for each call of Describe."""

    def __init__(self, ports: list[int], role: str = "actor") -> None:
        self.asked, self.epoch, self._ports, self._role = asyncio.Queue[None](), 7, ports, role

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        self.asked.put_nowait(None)
        ends = (common_pb2.Endpoint(address=f"127.0.0.1:{port}") for port in self._ports)
        ranks = [worker_pb2.RankInfo(endpoint=end) for end in ends]
        return worker_pb2.DescribeResponse(role=self._role, epoch=self.epoch, ranks=ranks)


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
        services = Discovery(config, print)
        async with served(first, ports[0]):
            with pytest.raises(ServiceLost, match=rf": actor rank 1 .*:{ports[1]}\) cannot be reached"):
                await services.find("actor", time.monotonic() + 0.5)
            asked = first.asked.qsize()
            finding = asyncio.ensure_future(services.find("actor", time.monotonic() + WAIT_S))
            for _ in range(asked + 2):
                await first.asked.get()
            assert not finding.done()
            async with served(last, ports[1]):
                assert len((await finding).ranks) == 2
                await last.asked.get()

    asyncio.run(asyncio.wait_for(test(), 2 * WAIT_S))


def test_a_service_that_was_started_again_while_others_were_waited_for_is_found_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "SILENCE_S", 0.3)

    async def test() -> None:
        ports = free_ports(2)
        reward, critic = (Rank([port], role) for port, role in zip(ports, ROLES, strict=True))
        settings = (
            f"services.{role}.address=127.0.0.1:{port}" for port, role in zip(ports, ROLES, strict=True)
        )
        config = load(QUICKSTART, tuple(settings))
        few = config.model_copy(update={"services": {role: config.services[role] for role in ROLES}})
        waits = asyncio.Event()
        finding = asyncio.ensure_future(Discovery(few, lambda line: waits.set()).find_all())
        async with served(reward, ports[0]):
            await waits.wait()
            reward.epoch = 8
            async with served(critic, ports[1]):
                found = await finding
        assert {name: each.epoch for name, each in found.items()} == {"reward": 8, "critic": 7}

    asyncio.run(asyncio.wait_for(test(), WAIT_S))
