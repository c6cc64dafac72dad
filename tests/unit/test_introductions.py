"""Whom a rank may connect to, and what becomes of calls that name others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from unit.test_execution import MetRanks, Reference

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports.tcp_wire import ADVERT
from rlhf.contract import group_methods
from rlhf.errors import InvalidRequest, Refused
from rlhf.v1 import common_pb2 as pb
from services.runtime import introductions
from services.runtime.execution import CallQueue
from services.runtime.introductions import Introductions
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.reference import ReferenceTable

KEY = "0123456789abcdef" * 2
SOCKET = b"rlhf-" + KEY.encode()


def adverts(port: int = 40000, key: bytes = bytes(range(16)), socket: bytes = SOCKET) -> dict[str, bytes]:
    return {"memfd": socket, "tcp": ADVERT.pack(port, key)}


OTHER = Endpoint("10.0.0.2:7101", "host", 5, "actor", 1, adverts())
OWN = Endpoint("10.0.0.1:7101", "host", 5, "reference", 0, adverts(40001))
PEER = Endpoint("10.0.0.1:33333", "host", 5, "reference", 1)


def proto(endpoint: Endpoint = OTHER, **changes: Any) -> pb.Endpoint:
    message = endpoint_to_proto(endpoint)
    for name, value in changes.items():
        if name == "adverts":
            message.adverts.clear()
            message.adverts.update(value)
        else:
            setattr(message, name, value)
    return message


@pytest.fixture
def table() -> Iterator[Introductions]:
    fetcher = Fetcher("host", create_readers(["memfd", "tcp", "grpc"]))
    yield Introductions(lambda: (None, OWN, PEER), fetcher.check_adverts, lambda endpoint: None)
    fetcher.close()


def names(table: Introductions, session: str, *endpoints: pb.Endpoint) -> str:
    """Why a call may not name endpoints; empty where it may."""
    try:
        table.check(session, endpoints)
    except InvalidRequest as error:
        return str(error)
    return ""


def test_a_rank_knows_itself_and_its_peers_and_nobody_else(table: Introductions) -> None:
    assert names(table, "run", proto(OWN), proto(PEER)) == ""
    assert names(table, "run", proto(OWN), proto(OTHER)) == (
        "session 'run' has not introduced the endpoint actor rank 1 at 10.0.0.2:7101 to this rank "
        "(WorkerService.Introduce)"
    )


def test_what_a_session_introduced_is_known_to_it_alone_until_it_ends(table: Introductions) -> None:
    table.add("run", [proto(OTHER)])
    assert names(table, "run", proto(OTHER)) == ""
    assert "10.0.0.2:7101" in names(table, "another", proto(OTHER))
    assert "10.0.0.2:7101" in names(table, "", proto(OTHER))
    table.forget("another")
    assert names(table, "run", proto(OTHER)) == ""
    table.forget("run")
    assert "10.0.0.2:7101" in names(table, "run", proto(OTHER))


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "10.0.0.2:7102"},
        {"host_id": "another"},
        {"epoch": 4},
        {"adverts": adverts(socket=b"rlhf-" + KEY[::-1].encode())},
        {"adverts": adverts(40002)},
        {"adverts": adverts(key=bytes(16))},
        {"adverts": {"tcp": adverts()["tcp"]}},
        {"adverts": {**adverts(), "unknown": b""}},
    ],
)
@pytest.mark.parametrize("known", [OTHER, OWN])
def test_an_endpoint_that_is_named_otherwise_than_it_was_introduced_is_another(
    table: Introductions, changes: dict[str, Any], known: Endpoint
) -> None:
    table.add("run", [proto(OTHER)])
    said = names(table, "run", proto(known, **changes))
    assert f"rank {known.rank} at {changes.get('address', known.address)}" in said
    assert ("a different endpoint with this address" in said) == ("address" not in changes)


def test_a_rank_that_comes_back_under_a_new_epoch_takes_the_place_of_the_old(table: Introductions) -> None:
    third = Endpoint("10.0.0.3:7101", epoch=5)
    table.add("run", [proto(OTHER), proto(third)])
    table.add("run", [proto(OTHER, epoch=6)])
    assert names(table, "run", proto(OTHER, epoch=6), proto(third)) == ""
    assert "a different endpoint with this address" in names(table, "run", proto(OTHER))


def test_what_no_session_has_introduced_any_more_is_forgotten_and_nothing_else() -> None:
    gone: list[Endpoint] = []
    table = Introductions(lambda: (None, OWN, PEER), lambda adverts: None, gone.append)
    third = Endpoint("10.0.0.3:7101", epoch=5)
    table.add("run", [proto(OTHER), proto(OWN), proto(third)])
    table.add("another", [proto(third)])
    table.add("run", [proto(OTHER)])
    assert not gone
    table.add("run", [proto(OTHER, epoch=6)])
    assert gone == [OTHER]
    table.forget("run")
    assert gone == [OTHER, replace(OTHER, epoch=6)]
    table.forget("another")
    assert gone == [OTHER, replace(OTHER, epoch=6), third]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"address": ""}, "host:port with a port from 1 to 65535"),
        ({"address": "10.0.0.2"}, "host:port with a port from 1 to 65535"),
        ({"address": ":7101"}, "host:port with a port from 1 to 65535"),
        ({"address": "10.0.0.2:0"}, "host:port with a port from 1 to 65535"),
        ({"address": "10.0.0.2:65536"}, "host:port with a port from 1 to 65535"),
        ({"address": "10.0.0.2:²"}, "host:port with a port from 1 to 65535"),
        ({"address": "unix:/run/other.sock"}, "host:port with a port from 1 to 65535"),
        ({"address": "unix:7101"}, "gRPC takes it for the kind of an address"),
        ({"address": "unix-abstract:7101"}, "gRPC takes it for the kind of an address"),
        ({"address": "vsock:7101"}, "gRPC takes it for the kind of an address"),
        ({"address": "dns:///10.0.0.2:7101"}, "not a host alone"),
        ({"address": "::1:7101"}, "in brackets"),
        ({"address": "0.0.0.0:7101"}, "no address that others can connect to"),
        (
            {"adverts": adverts(socket=b"/tmp/.X11-unix/X0")},
            "adverts: transport memfd: b'/tmp/.* is not a valid socket name",
        ),
        ({"adverts": adverts(0)}, "adverts: transport tcp: port must be above 0"),
        ({"adverts": {"tcp": b"xyz"}}, "adverts: transport tcp: 3 bytes, not the 18"),
        ({"adverts": {"grpc": b"xyz"}}, "adverts: transport grpc: 3 bytes, where there are none"),
        ({"service": "x" * 1024}, "at most 1024 are allowed"),
    ],
)
def test_what_cannot_be_an_endpoint_is_not_introduced_nor_what_comes_with_it(
    table: Introductions, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        table.add("run", [proto(OTHER), proto(OTHER, **changes)])
    assert names(table, "run", proto(OTHER)) != ""


def test_a_session_has_so_many_endpoints_and_no_more(
    table: Introductions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "MOST_ENDPOINTS", 2)
    two = [proto(OTHER, address=f"10.0.0.{n}:7101") for n in (2, 3)]
    for _ in range(2):
        table.add("run", two)
    with pytest.raises(InvalidRequest, match="has 3 endpoints with these; at most 2 are allowed"):
        table.add("run", [proto(OTHER, address="10.0.0.4:7101")])
    assert names(table, "run", *two) == ""


def far(endpoint: Endpoint = OTHER) -> RemoteColumn:
    """A row that some rank says it holds."""
    return RemoteColumn.of_shard("int64", (), np.array([1]), Shard(endpoint, 1, 64, 8))


class Rank:
    """The calls of one rank, which reads what it is sent."""

    def __init__(self, ranks: int = 1, worker: type[Reference] = Reference) -> None:
        self.store = TensorStore(1 << 16)
        self.store.endpoint = OWN
        self.fetcher = Fetcher("host", [], self.store)
        settings = ReferenceTable(role="reference", address="127.0.0.1:1", ranks=ranks, model=Path())
        self.queue = CallQueue(worker(settings, MetRanks(0, ranks, 1)), self.store, self.fetcher)

    def near(self) -> RemoteColumn:
        values = Jagged(np.array([7]), np.array([1]))
        return self.store.put_column(values, "int64", Lease("rows", 1))

    def start(self, sequence: int, column: RemoteColumn, session: str = "run") -> asyncio.Future[Any]:
        method = group_methods("reference")["compute_ref_log_prob"]
        call = pb.Call(
            call_id=f"{session} {sequence} {column.shards[0].endpoint}", session=session, sequence=sequence
        )
        batch = wire.to_proto(Batch(1, {"prompt_ids": column}))
        request = cast(Any, method.request)(call=call, batch=batch, temperature=1.0)
        return self.queue.start(method, cast(Any, Reference.compute_ref_log_prob).registration, request, 10)


@contextmanager
def a_rank(ranks: int = 1, worker: type[Reference] = Reference) -> Iterator[Rank]:
    rank = Rank(ranks, worker)
    yield rank
    rank.fetcher.close()
    rank.store.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_that_names_a_stranger_is_over_before_its_turn_and_holds_up_no_other(ranks: int) -> None:
    async def main(rank: Rank) -> None:
        begins = rank.start(1, rank.near())
        await begins
        waiting = rank.start(4, rank.near())
        for sequence in (3, 2):
            for _ in range(2):  # a retry gets the same answer
                with pytest.raises(
                    InvalidRequest, match=r"not introduced the endpoint actor rank 1 at 10\.0\.0\.2:7101"
                ):
                    rank.start(sequence, far())
        assert (await waiting).outcome.metrics["sum"].sum == 7.0
        await rank.queue.drain()

    with a_rank(ranks) as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))


class Held(Reference):
    """Computes for as long as it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.ends = threading.Event(), threading.Event()

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.begun.set()
        assert self.ends.wait(20)
        return CallResult()


def test_refused_calls_by_the_number_of_the_running_one_and_the_next_hold_up_no_other() -> None:
    async def main(rank: Rank) -> None:
        worker = cast(Held, rank.queue.worker)
        running = rank.start(1, rank.near())
        await asyncio.to_thread(worker.begun.wait, 20)
        for sequence in (1, 2):
            with pytest.raises(InvalidRequest):
                rank.start(sequence, far())
        behind = rank.start(3, rank.near())
        worker.ends.set()
        await asyncio.gather(running, behind)
        await rank.queue.drain()

    with a_rank(worker=Held) as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))


def test_only_the_current_session_introduces_and_its_end_is_the_end_of_that() -> None:
    async def main(rank: Rank) -> None:
        for name in ("", "run"):
            with pytest.raises(Refused, match="is not open on this rank, so its endpoints are not accepted"):
                rank.queue.introduce(name, [proto(OTHER)])
        await rank.start(1, rank.near())
        rank.queue.introduce("run", [proto(OTHER)])
        forgotten: list[Endpoint] = []
        rank.fetcher.forget = forgotten.append  # type: ignore[method-assign]
        known = rank.start(2, far())
        assert not known.done()
        with pytest.raises(Exception, match="no transport reaches actor rank 1"):
            await known
        assert not forgotten
        rank.queue.sessions.end("run")
        assert forgotten == [OTHER]
        await rank.start(1, rank.near(), session="next")
        with pytest.raises(InvalidRequest, match="session 'next' has not introduced"):
            await rank.start(2, far(), session="next")
        with pytest.raises(Refused):
            rank.queue.introduce("run", [proto(OTHER)])
        await rank.queue.drain()

    with a_rank() as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))


def test_calls_without_a_session_read_from_the_rank_itself() -> None:
    async def main(rank: Rank) -> None:
        assert (await rank.start(0, rank.near(), session="")).outcome.metrics["sum"].sum == 7.0
        rank.queue.sessions.open(pb.Call(session="run", sequence=1))
        rank.queue.introduce("run", [proto(OTHER)])
        with pytest.raises(InvalidRequest, match="session '' has not introduced"):
            await rank.start(0, far(), session="")
        await rank.queue.drain()

    with a_rank() as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))


def test_every_endpoint_of_a_batch_counts_also_those_that_only_relay() -> None:
    async def main(rank: Rank) -> None:
        method = group_methods("reference")["compute_ref_log_prob"]
        batch = wire.to_proto(Batch(1, {"prompt_ids": rank.near()}))
        batch.endpoints.append(proto(OTHER))
        batch.relays.add(source=0, reader=1)
        request = cast(Any, method.request)(call=pb.Call(call_id="relay"), batch=batch, temperature=1.0)
        registration = cast(Any, Reference.compute_ref_log_prob).registration
        with pytest.raises(InvalidRequest, match=r"10\.0\.0\.2:7101"):
            await rank.queue.start(method, registration, request, 10)
        await rank.queue.drain()

    with a_rank() as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))


def test_a_call_that_names_a_stranger_takes_no_number_of_a_call_that_waits() -> None:
    async def main(rank: Rank) -> None:
        worker = cast(Held, rank.queue.worker)
        running = rank.start(1, rank.near())
        await asyncio.to_thread(worker.begun.wait, 20)
        behind = rank.start(2, rank.near())
        for sequence in (2, 1 << 40):
            with pytest.raises(InvalidRequest):
                rank.start(sequence, far())
        worker.ends.set()
        await asyncio.gather(running, behind)
        await rank.queue.drain()

    with a_rank(worker=Held) as rank:
        asyncio.run(asyncio.wait_for(main(rank), 20))
