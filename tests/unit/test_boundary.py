"""The boundary of a rank, at which errors become statuses."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import grpc
import grpc.aio
import pytest

from rlhf.contract import SERVICES
from rlhf.errors import InvalidRequest
from rlhf.v1 import worker_pb2
from services.runtime.boundary import RpcBoundary
from services.runtime.ranks import Ranks
from services.runtime.worker import Worker
from settings.reward import RewardTable

CANCEL = SERVICES["worker"]["Cancel"]
TIMEOUT_S = 5


class Reward(Worker):
    """Computes nothing."""

    role = "reward"


class Rows:
    """Rows of a call."""


def test_the_rows_of_a_failed_call_are_freed_without_the_garbage_collector() -> None:
    made: list[weakref.ref[Rows]] = []

    async def handler(request: Any, context: Any) -> None:
        rows = Rows()
        made.append(weakref.ref(rows))
        raise InvalidRequest("no")

    async def fail_once() -> None:
        worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        boundary = RpcBoundary(worker, "reward", asyncio.Event())
        server = grpc.aio.server()
        table = {"Cancel": boundary.rpc_handler(CANCEL, handler)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CANCEL.service, table),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(
                CANCEL.path, request_serializer=worker_pb2.CancelRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError, match="no"):
                await call(worker_pb2.CancelRequest(call_id="1"), timeout=TIMEOUT_S)
        await server.stop(None)

    gc.disable()
    try:
        asyncio.run(fail_once())
        assert [rows() for rows in made] == [None]
    finally:
        gc.enable()
