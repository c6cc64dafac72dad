"""Waits for the other end of a transfer: how they end when it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from nccl_transfer.transports.gpu.liveness import LivenessStream, wait_for_answer
from rlhf.errors import DeadlineExceeded


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    """To a server whose stream yields one message and stays open, and whose other method does not answer."""
    ended = threading.Event()

    def attach(request: bytes, context: Any) -> Iterator[bytes]:
        yield b""
        ended.wait(20)

    def answer(request: bytes, context: Any) -> bytes:
        ended.wait(20)
        return b""

    handlers = {
        "Attach": grpc.unary_stream_rpc_method_handler(attach),
        "Answer": grpc.unary_unary_rpc_method_handler(answer),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
        ended.set()
    server.stop(None)


@pytest.mark.parametrize("of_grpc_s", [0.2, 20.0], ids=["gRPC is first", "the wait is first"])
def test_a_call_without_an_answer_is_told_alike_whoever_notes_its_deadline(
    channel: grpc.Channel, of_grpc_s: float
) -> None:
    stream: Any = channel.unary_stream("/test/Attach")
    method: Any = channel.unary_unary("/test/Answer")
    liveness = LivenessStream(stream(b""), threading.Event())
    liveness.first(time.monotonic() + 10, "attach")
    with pytest.raises(DeadlineExceeded, match=r"^plan 1, prepare: no answer by the deadline$"):
        wait_for_answer(
            method.future(b"", timeout=of_grpc_s),
            liveness,
            time.monotonic() + (10.0 if of_grpc_s < 1 else 0.2),
            "plan 1, prepare",
        )
    liveness.cancel()
