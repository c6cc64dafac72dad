"""The boundary of a rank, at which errors become statuses."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transfer_service import mark_corrupt_response
from rlhf.contract import SERVICES
from rlhf.errors import InvalidRequest, RlhfError, drop_frames, from_rpc_error
from rlhf.v1 import transfer_pb2, worker_pb2
from services.runtime.boundary import MOST_LOGGED, RpcBoundary
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


async def fail(handler: Any) -> RlhfError:
    """The error that a client is given whose call the handler answers."""
    worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
    boundary = RpcBoundary(worker, asyncio.Event())
    server = grpc.aio.server()
    table = {"Cancel": boundary.rpc_handler(CANCEL, handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CANCEL.service, table),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(
                CANCEL.path, request_serializer=worker_pb2.CancelRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(worker_pb2.CancelRequest(call_id="1"), timeout=TIMEOUT_S)
    finally:
        await server.stop(None)
    return from_rpc_error(caught.value, "reward")


def test_the_rows_of_a_failed_call_are_freed_without_the_garbage_collector() -> None:
    made: list[weakref.ref[Rows]] = []

    async def handler(request: Any, context: Any) -> None:
        rows = Rows()
        made.append(weakref.ref(rows))
        raise InvalidRequest("no")

    gc.disable()
    try:
        assert str(asyncio.run(fail(handler))) == "reward: no"
        assert [rows() for rows in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_remembered", [False, True])
def test_the_traceback_of_an_unforeseen_error_is_in_the_log_and_its_name_in_the_status(
    is_remembered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of one that a call has left behind without its frames."""

    async def handler(request: Any, context: Any) -> None:
        try:
            {}["a row that is not there"]
        except KeyError as error:
            if is_remembered:
                drop_frames(error)
            raise

    caplog.set_level(logging.INFO)
    error = asyncio.run(fail(handler))
    (logged,) = [record for record in caplog.records if "Cancel" in record.message]
    assert logged.levelno == logging.ERROR
    for text in (logged.message, error.remote_traceback):
        assert "Traceback (most recent call last)" in text
        assert '{}["a row that is not there"]' in text
    assert str(error) == "reward: KeyError: 'a row that is not there'"


def test_an_error_of_the_caller_is_in_the_log_by_its_text_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Any, context: Any) -> None:
        raise InvalidRequest("no such row")

    caplog.set_level(logging.INFO)
    assert str(asyncio.run(fail(handler))) == "reward: no such row"
    (logged,) = [record for record in caplog.records if "Cancel" in record.message]
    assert logged.levelno == logging.INFO
    assert logged.message.endswith("InvalidRequest: no such row")


def test_a_caller_neither_fills_the_log_nor_writes_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """The launcher reads lines that begin with `fatal: `."""
    caplog.set_level(logging.INFO)
    worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
    boundary = RpcBoundary(worker, asyncio.Event())
    boundary.status_of(InvalidRequest("no\nfatal: " + "x" * 10**6), "Cancel", "1\nfatal: \x1b[2J")
    (logged,) = caplog.records
    assert logged.message.startswith(r"Cancel 1\nfatal: \x1b[2J: InvalidRequest: no\nfatal: x")
    assert "\n" not in logged.message
    assert len(logged.message) < 2_000
    assert logged.message.endswith("(1000010 characters)")


def test_a_traceback_in_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """That of a path that is too long repeats the path, which may fill a message."""
    worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
    boundary = RpcBoundary(worker, asyncio.Event())
    worker.output_roots = (Path("/"),)
    with pytest.raises(InvalidRequest) as caught:
        worker.output_path("/" + "x" * 10**6)
    boundary.status_of(caught.value, "BeginSession", "1")
    (logged,) = caplog.records
    assert len(logged.message) < MOST_LOGGED + 100
    assert "InvalidRequest: directory: " in logged.message


def test_a_traceback_in_the_log_moves_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
    RpcBoundary(worker, asyncio.Event()).status_of(ValueError("said\x1b[2J"), "Score", "1")
    (logged,) = caplog.records
    assert logged.message == "Score 1 failed:\nValueError: said\\x1b[2J\n"


def test_the_reason_for_which_a_reader_marks_a_shard_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    (store := TensorStore(1 << 16)).endpoint = Endpoint("127.0.0.1:1", epoch=1)
    request = transfer_pb2.MarkCorruptRequest(shard=1, reason="bad\nfatal: " + "x" * 10**6)
    mark_corrupt_response(store, request)
    (logged,) = caplog.records
    assert "\n" not in logged.message
    assert len(logged.message) < 2_000
