"""Responses that a rank remembers for retries."""

from __future__ import annotations

import asyncio

from rlhf.contract import group_methods
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime import responses
from services.runtime.responses import ResponseMemory

METHOD = group_methods("reward")["synchronize"]


async def end(memory: ResponseMemory, call_id: str, session: str = "") -> None:
    response = asyncio.get_running_loop().create_future()
    memory.add(
        METHOD, common_pb2.Call(call_id=call_id, session=session, sequence=int(bool(session))), response
    )
    response.set_result(worker_pb2.SynchronizeResponse())
    await asyncio.sleep(0)


def test_responses_are_forgotten_although_an_older_call_still_runs() -> None:
    async def main() -> None:
        memory = ResponseMemory()
        running = asyncio.get_running_loop().create_future()
        memory.add(METHOD, common_pb2.Call(call_id="running"), running)
        for number in range(2 * responses.REMEMBERED_CALLS):
            await end(memory, str(number))
        known = [str(number) in memory for number in range(2 * responses.REMEMBERED_CALLS)]
        assert known == [False] * responses.REMEMBERED_CALLS + [True] * responses.REMEMBERED_CALLS
        assert memory.find(METHOD, common_pb2.Call(call_id="running")) is running
        assert memory.to_come == [running]

    asyncio.run(main())


def test_sessions_do_not_drop_each_other_s_responses() -> None:
    async def main() -> None:
        memory = ResponseMemory()
        await end(memory, "rare", "quiet")
        for number in range(2 * responses.REMEMBERED_CALLS):
            await end(memory, f"run_{number}", "busy")
            await end(memory, f"single_{number}")
        assert "rare" in memory
        assert "run_0" not in memory
        for number in range(responses.REMEMBERED_SESSIONS):
            await end(memory, f"call_{number}", f"session_{number}")
        assert "rare" not in memory

    asyncio.run(main())
