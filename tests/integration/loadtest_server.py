"""A reward with manners a load test has to see, in a process of its own: no Describe, no reading of call headers.

`python -m loadtest_server MANNER [SERVICE_S]` says its port, serves until SIGTERM, then says how many
calls it still had.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
import sys
import time
from typing import Any

import grpc
import grpc.aio

from rlhf.v1 import common_pb2, reward_pb2, reward_pb2_grpc

STALL_S = 0.2
STALL_EVERY_S = 1.0
DEFAULT_SERVICE_S = 0.01


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Scores every row 1, as its manner says: `prompt`, `slow`, `stalling`, `queueing`, `silent`, `refusing` or
    `half`."""

    def __init__(self, manner: str, service_s: float) -> None:
        self.running = 0
        self._answer = getattr(self, f"_{manner}")
        self._service_s = service_s
        self._free_at = 0.0

    async def ComputeReward(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        self.running += 1
        try:
            return await self._answer(request, context)
        finally:
            self.running -= 1

    async def _prompt(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        return reward_pb2.ComputeRewardResponse(
            scores=[reward_pb2.RowScore(score=1) for _ in request.text_rows]
        )

    async def _slow(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        """Takes its time over every call, and any number of them at once."""
        await asyncio.sleep(self._service_s)
        return await self._prompt(request, context)

    async def _stalling(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        """Stands still for the first 200 ms of every second."""
        await asyncio.sleep(max(STALL_S - time.monotonic() % STALL_EVERY_S, 0))
        return await self._prompt(request, context)

    async def _queueing(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        """One server with a fixed service time. It is told by the clock when it is free: a late wake-up delays one
        answer, and not the calls behind it."""
        now = time.monotonic()
        begins = max(now, self._free_at)
        self._free_at = begins + self._service_s
        await asyncio.sleep(self._free_at - now)
        response = await self._prompt(request, context)
        response.outcome.timing.CopyFrom(common_pb2.Timing(queue_s=begins - now, compute_s=self._service_s))
        return response

    async def _silent(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async def _refusing(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room today")
        raise AssertionError

    async def _half(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        response = await self._prompt(request, context)
        response.scores[0].error = "cannot be read"
        return response


async def serve(manner: str, service_s: float = DEFAULT_SERVICE_S) -> None:
    """Serves until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server, reward = grpc.aio.server(), Reward(manner, service_s)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await ended.wait()
    print(f"running: {reward.running}", flush=True)
    await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(sys.argv[1], *map(float, sys.argv[2:])))
