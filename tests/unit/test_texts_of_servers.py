"""Texts of servers reach a terminal or a log as one bounded line, in which no character moves a cursor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from conformance.target import described, excerpt
from controller.role_groups.discovery import _connection_failure
from controller.role_groups.verdicts import not_scored
from deploy.health import Probe, ask
from loadtest.caller import _code_and_cause, _row_error
from rlhf import channels
from rlhf.channels import why_not_connected
from rlhf.errors import ServiceLost
from rlhf.v1 import reward_pb2

HOSTILE = "no\nfatal: \x1b[2J" + "x" * 3_000


class Refusing(grpc.GenericRpcHandler):
    """Ends every call with HOSTILE."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.INTERNAL, HOSTILE)
        )


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Refusing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def check(text: str) -> None:
    assert text.isprintable()
    assert "\\x1b[2J" in text
    assert len(text) < 1_200


def test_the_cause_of_a_failed_health_check(address: str) -> None:
    probe, deadline = Probe(address), time.monotonic() + 20
    while not probe.reason and time.monotonic() < deadline:
        assert not probe.serving()
        time.sleep(0.01)
    probe.close()
    check(probe.reason)


def test_the_cause_of_a_service_that_rlhf_deploy_health_finds_not_serving(address: str) -> None:
    check(ask(address).why)


def test_a_server_that_closes_a_connection_without_tls_may_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:7304: Socket closed"
    assert why_not_connected(said) == "Socket closed (as by a server with TLS; no [security] is given here)"
    monkeypatch.setattr(channels, "current", lambda: SimpleNamespace(certificates=object()))
    assert why_not_connected(said) == "Socket closed"


def test_the_errors_that_rlhf_conformance_quotes(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/any/method")(b"", timeout=20)
    check(described(caught.value))
    check(excerpt(HOSTILE))


def test_the_causes_that_rlhf_loadtest_prints() -> None:
    check(_code_and_cause(_lost())[1])
    check(_row_error(reward_pb2.ComputeRewardResponse(scores=[reward_pb2.RowScore(error=HOSTILE)])))


def test_why_a_service_does_not_answer_describe() -> None:
    check(_connection_failure(_lost()))


def test_why_a_row_could_not_be_scored() -> None:
    check(str(not_scored("reward", {3: HOSTILE}, 8)))


def _lost() -> ServiceLost:
    error = ServiceLost("lost")
    nothing = grpc.aio.Metadata()
    error.__cause__ = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, HOSTILE)
    return error
