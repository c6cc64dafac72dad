"""A service with certificates and tokens answers those alone that have them, each as far as its token reaches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.rpc import status_pb2

from deploy.certificates import TABLE, write_certificates
from integration.harness import is_listening, wait_until
from rlhf import channels, guard
from rlhf.access import LIBRARY_METHODS, Access
from rlhf.contract import CHANNEL_OPTIONS, SERVICES
from rlhf.security import PLAINTEXT, Security, adopted
from rlhf.v1 import common_pb2, reward_pb2, worker_pb2
from services.reward.scorers import base
from services.reward.worker import RewardWorker
from services.runtime import server
from services.runtime.ranks import Ranks
from services.runtime.server import RankServer
from settings.reward import RewardTable
from settings.security import SecurityTable, load_security
from settings.strict import read_toml

T = TypeVar("T")
TIMEOUT_S = 20.0
METHODS = {
    **{
        each.path: each.access
        for name in ("reward", "worker", "transfer")
        for each in SERVICES[name].values()
    },
    **LIBRARY_METHODS,
}
"""Classes of all methods that a reward serves, by path."""
DESCRIBE = SERVICES["worker"]["Describe"].path
UNKNOWN = "/rlhf.v1.RewardService/NoSuchMethod"
REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED"}


def while_serving(security: Security, use: Callable[[str], T]) -> T:
    """Starts a reward service with these credentials, calls `use` with its address, and returns the result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    table = RewardTable(role="reward", address=address)

    async def serve() -> T:
        ranks = RankServer(RewardWorker(table, Ranks(0, 1, 1)))
        serving = asyncio.ensure_future(ranks.serve())
        try:
            there = partial(is_listening, address)
            await asyncio.to_thread(wait_until, there, TIMEOUT_S, "a rank that listens")
            return await asyncio.wait_for(asyncio.to_thread(use, address), TIMEOUT_S)
        finally:
            ranks._stop.set()
            await asyncio.wait_for(serving, TIMEOUT_S)

    with adopted(security):
        return asyncio.run(serve())


@pytest.fixture(scope="module")
def security(certificates: Path) -> Security:
    return load_security(certificates)


def credentials(certificates: Path, name: str = "client") -> grpc.ChannelCredentials:
    """Credentials of a client with the certificate of a name; "": without one."""
    directory = certificates.parent
    pair = [(directory / f"{name}.{kind}").read_bytes() for kind in ("key", "pem")] if name else []
    return grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes(), *pair)


def codes(
    channel: grpc.Channel, paths: Iterable[str], token: str | None, timeout_s: float = 2.0
) -> dict[str, str]:
    """How an empty call of each method ended, or OK after its first response."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    found = {}
    for path in paths:
        call: Any = channel.stream_stream(path)(iter([b""]), timeout=timeout_s, metadata=metadata)
        try:
            next(call, None)
            found[path] = "OK"
        except grpc.RpcError:
            found[path] = call.code().name
        finally:
            call.cancel()
    return found


def wait_ready(address: str, certificates: Path) -> grpc.Channel:
    channel = grpc.secure_channel(address, credentials(certificates), CHANNEL_OPTIONS)
    grpc.channel_ready_future(channel).result(TIMEOUT_S)
    return channel


def test_no_method_answers_a_client_without_the_right_certificate(
    security: Security, certificates: Path, other_certificates: Path
) -> None:
    stranger = credentials(other_certificates)
    # It trusts the service, and its own certificate is of another authority.
    mixed = grpc.ssl_channel_credentials(
        (certificates.parent / "ca.pem").read_bytes(),
        *((other_certificates.parent / f"client.{kind}").read_bytes() for kind in ("key", "pem")),
    )

    def use(address: str) -> None:
        wait_ready(address, certificates).close()
        channels = [
            grpc.insecure_channel(address),
            *(
                grpc.secure_channel(address, each)
                for each in (credentials(certificates, ""), stranger, mixed)
            ),
        ]
        for channel in channels:
            found = codes(channel, [*METHODS, UNKNOWN], security.tokens[Access.ADMINISTER])
            assert set(found.values()) == {"UNAVAILABLE"}, found
            channel.close()

    while_serving(security, use)


def test_the_certificate_of_a_client_does_not_make_a_service(security: Security, certificates: Path) -> None:
    files = {"certificate": certificates.parent / "client.pem", "key": certificates.parent / "client.key"}
    pretender = SecurityTable.model_validate({**read_toml(certificates)["security"], **files}).load()

    def use(address: str) -> dict[str, str]:
        with grpc.secure_channel(address, credentials(certificates)) as channel:
            return codes(channel, [DESCRIBE], security.tokens[Access.ADMINISTER])

    assert while_serving(pretender, use) == {DESCRIBE: "UNAVAILABLE"}


def test_a_name_that_all_services_share_stands_for_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificates(tmp_path / "certs", ("every-service",), days=1)
    table = read_toml(tmp_path / "certs" / TABLE)["security"]

    def use(address: str) -> tuple[str, str]:
        found = []
        for name in ("every-service", "another-service"):
            client = SecurityTable.model_validate({**table, "server_name": name}).load()
            monkeypatch.setattr(channels, "current", lambda client=client: client)
            with channels.open_channel(address) as channel:
                found.append(codes(channel, [DESCRIBE], None)[DESCRIBE])
        return found[0], found[1]

    assert while_serving(SecurityTable.model_validate(table).load(), use) == ("OK", "UNAVAILABLE")


def test_a_channel_carries_the_token_that_its_calls_need_and_no_higher_one(
    security: Security, certificates: Path
) -> None:
    worker = SERVICES["worker"]
    paths = [worker[name].path for name in ("Describe", "Cancel", "SaveCheckpoint")]

    def use(address: str) -> dict[Access, dict[str, str]]:
        wait_ready(address, certificates).close()
        found = {}
        for access in Access:
            with channels.open_channel(address, access=access) as channel:
                found[access] = codes(channel, paths, None)
        return found

    for access, found in while_serving(security, use).items():
        assert "UNAUTHENTICATED" not in found.values()
        for path, code in found.items():
            assert (code == "PERMISSION_DENIED") == (access < METHODS[path]), (access, path, code)


def test_a_client_in_plaintext_is_told_nothing(security: Security, certificates: Path) -> None:
    def use(address: str) -> bytes:
        wait_ready(address, certificates).close()
        with socket.create_connection(
            ("127.0.0.1", int(address.rpartition(":")[2])), timeout=10
        ) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            heard = b""
            while received := connection.recv(4096):
                heard += received
            return heard

    heard = while_serving(security, use)
    # No more than an alert of TLS: type 21, version, length, level and number.
    assert heard == b"" or (heard[0] == 21 and len(heard) == 7)


def test_a_token_reaches_as_far_as_its_class_and_no_token_nowhere(
    security: Security, certificates: Path
) -> None:
    def use(address: str) -> dict[str | None, dict[str, str]]:
        channel = wait_ready(address, certificates)
        paths = [*METHODS, UNKNOWN]
        tokens = (None, "x" * 43, *security.tokens.values())
        found = {token: codes(channel, paths, token, 0.5) for token in tokens}
        channel.close()
        return found

    found = while_serving(security, use)
    for token in (None, "x" * 43):
        assert set(found[token].values()) == {"UNAUTHENTICATED"}, found[token]
    for granted, token in security.tokens.items():
        for path, code in found[token].items():
            needed = METHODS.get(path, Access.ADMINISTER)
            assert (code == "PERMISSION_DENIED") == (granted < needed), (granted, path, code)
            assert code != "UNAUTHENTICATED"
    assert found[security.tokens[Access.ADMINISTER]][UNKNOWN] == "UNIMPLEMENTED"


def test_a_refusal_says_in_a_sentence_what_is_needed(security: Security, certificates: Path) -> None:
    def said(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/rlhf.v1.WorkerService/SaveCheckpoint")(
                b"", timeout=5, metadata=tuple(metadata)
            )
        return caught.value.details()  # type: ignore[attr-defined]

    def use(address: str) -> list[str]:
        with wait_ready(address, certificates) as channel:
            header = f"Bearer {security.tokens[Access.READ]}"
            return [
                said(channel, []),
                said(channel, [("authorization", "Bearer nobody's")]),
                said(channel, [("authorization", header), ("authorization", header)]),
                said(channel, [("authorization", header)]),
            ]

    without = "a token is needed: metadata 'authorization' with the value 'Bearer TOKEN'"
    assert while_serving(security, use) == [
        without,
        "this token is not one of the service's tokens",
        without,
        "/rlhf.v1.WorkerService/SaveCheckpoint requires a token of class administer; the given token is of class read",
    ]


def test_a_call_inside_a_stream_needs_what_it_needs_outside(security: Security, certificates: Path) -> None:
    def ask(channel: grpc.Channel, method: str, access: Access, take_over: bool = False) -> str:
        method_of = SERVICES["worker"][method]
        call = common_pb2.Call(call_id=f"{method}{access}{take_over}", take_over=take_over)
        request: Any = method_of.request
        message = worker_pb2.DispatchRequest(
            method=method_of.path, request=request(call=call).SerializeToString(), timeout_s=2
        )
        metadata = [("authorization", f"Bearer {security.tokens[access]}")]
        stream: Any = channel.stream_stream(SERVICES["worker"]["Dispatch"].path)
        answers = stream(iter([message.SerializeToString()]), timeout=5, metadata=metadata)
        answer = worker_pb2.DispatchResponse.FromString(next(answers))
        answers.cancel()
        status = status_pb2.Status.FromString(answer.status)
        return next(code.name for code in grpc.StatusCode if code.value[0] == status.code)

    def use(address: str) -> None:
        with wait_ready(address, certificates) as channel:
            assert ask(channel, "Synchronize", Access.CALL) == "OK"
            assert ask(channel, "SaveCheckpoint", Access.CALL) == "PERMISSION_DENIED"
            assert ask(channel, "SaveCheckpoint", Access.ADMINISTER) not in {*REFUSALS, "OK"}
            assert ask(channel, "Synchronize", Access.CALL, take_over=True) == "PERMISSION_DENIED"
            assert ask(channel, "Synchronize", Access.ADMINISTER, take_over=True) == "OK"

    while_serving(security, use)


def test_a_token_to_read_does_not_show_the_way_to_rows(security: Security, certificates: Path) -> None:
    def describe(channel: grpc.Channel, access: Access) -> Any:
        answer = channel.unary_unary(DESCRIBE)(
            b"", timeout=5, metadata=(("authorization", f"Bearer {security.tokens[access]}"),)
        )
        (rank,) = worker_pb2.DescribeResponse.FromString(answer).ranks
        return rank.endpoint

    def use(address: str) -> None:
        with wait_ready(address, certificates) as channel:
            reader, caller = describe(channel, Access.READ), describe(channel, Access.CALL)
            assert reader.address == caller.address == address
            assert not reader.adverts
            assert caller.adverts.keys() >= {"memfd", "tcp"}

    while_serving(security, use)


def test_tokens_are_not_in_the_log(
    security: Security, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def use(address: str) -> None:
        with wait_ready(address, certificates) as channel:
            for token in security.tokens.values():
                codes(channel, METHODS, token, 0.3)

    while_serving(security, use)
    assert caplog.records
    for token in security.tokens.values():
        assert token not in caplog.text


def test_refused_calls_leave_no_thread(security: Security, certificates: Path) -> None:
    def use(address: str) -> tuple[int, int]:
        with wait_ready(address, certificates) as channel:
            codes(channel, METHODS, None)
            before = threading.active_count()
            for _ in range(5):
                codes(channel, METHODS, None)
            return before, threading.active_count()

    before, after = while_serving(security, use)
    assert after <= before + 1


def test_more_calls_at_a_time_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST_RPCS", 3)

    def use(address: str) -> list[str]:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            watches: list[Any] = [
                channel.unary_stream(SERVICES["worker"]["Watch"].path)(b"", timeout=10) for _ in range(3)
            ]
            for watch in watches:
                next(watch)
            found = list(codes(channel, [DESCRIBE], None).values())
            watches[0].cancel()
            deadline = time.monotonic() + 5
            while "RESOURCE_EXHAUSTED" in (again := list(codes(channel, [DESCRIBE], None).values())):
                assert time.monotonic() < deadline
            for watch in watches:
                watch.cancel()
            return found + again

    assert while_serving(PLAINTEXT, use) == ["RESOURCE_EXHAUSTED", "OK"]


def test_streams_with_a_token_to_read_leave_rpcs_to_other_tokens(
    security: Security, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose request never comes."""
    monkeypatch.setattr(channels, "MOST_RPCS", 16)
    monkeypatch.setattr(guard, "MOST_READS", 2)
    release = SERVICES["worker"]["Release"].path
    to_read, to_call = security.tokens[Access.READ], security.tokens[Access.CALL]
    ended = threading.Event()

    def request_that_never_comes() -> Iterator[bytes]:
        ended.wait(TIMEOUT_S)
        yield from ()

    def use(address: str) -> None:
        with wait_ready(address, certificates) as channel:
            metadata = (("authorization", f"Bearer {to_read}"),)
            watch: Any = channel.unary_stream(SERVICES["worker"]["Watch"].path)
            opened = [watch(b"", timeout=10, metadata=metadata)]
            next(opened[0])
            check: Any = channel.stream_stream("/grpc.health.v1.Health/Check")
            opened += [check(request_that_never_comes(), timeout=10, metadata=metadata) for _ in range(19)]
            deadline = time.monotonic() + 5
            while sum(each.done() for each in opened) < 18:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert codes(channel, [DESCRIBE], to_read) == {DESCRIBE: "RESOURCE_EXHAUSTED"}
            assert codes(channel, [DESCRIBE, release], to_call) == {DESCRIBE: "OK", release: "OK"}
            for each in opened:
                each.cancel()
            ended.set()
            deadline = time.monotonic() + 5
            while codes(channel, [DESCRIBE], to_read) != {DESCRIBE: "OK"}:
                assert time.monotonic() < deadline

    try:
        while_serving(security, use)
    finally:
        ended.set()


def test_more_connections_than_there_may_be_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 4)

    def use(address: str) -> int:
        with contextlib.ExitStack() as opened:
            strangers = []
            for _ in range(12):
                place = ("127.0.0.1", int(address.rpartition(":")[2]))
                strangers.append(opened.enter_context(socket.create_connection(place, timeout=10)))
                strangers[-1].sendall(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
                )
            return sum(is_answered(each) for each in strangers)

    def is_answered(connection: socket.socket) -> bool:
        try:
            return bool(connection.recv(1))
        except OSError:
            return False

    assert while_serving(PLAINTEXT, use) <= 4


def test_more_text_rows_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_TEXT_ROWS", 2)

    def use(address: str) -> tuple[str, str]:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            request = reward_pb2.ComputeRewardRequest(text_rows=[reward_pb2.TextRow()] * 3)
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(SERVICES["reward"]["ComputeReward"].path)(
                    request.SerializeToString(), timeout=5
                )
            error: Any = caught.value
            return error.code().name, error.details()

    assert while_serving(PLAINTEXT, use) == (
        "INVALID_ARGUMENT",
        "compute_reward: 3 text rows; at most 2 are allowed in a call",
    )
