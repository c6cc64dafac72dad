"""Requests of a controller and their cost, against real ranks that serve in this process and compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from unit.test_execution import MetRanks

from client.fanout import FanOut
from client.rank import WORKER, RankClient
from client.session import Session
from controller.role_groups import group
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import resolved
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Placement
from controller.role_groups.roles import ReferenceGroup
from controller.training.columns import ColumnReader
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import TEXT
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.registry import create_readers
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import host_id
from rlhf.errors import DeadlineExceeded, InvalidRequest, OutOfSpace, Refused, TransferError
from rlhf.v1 import common_pb2, transfer_pb2, worker_pb2
from services.runtime.server import RankServer
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reference import ReferenceTable

TIMEOUT_S = 30.0
ROWS, SEED = 16, 3
MESHES = [Mesh(1, 1, 1), Mesh(1, 4, 1), Mesh(2, 4, 1)]

T = TypeVar("T")


class Echo(Worker):
    """Answers with the sum of the two numbers of each token."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        prompts, responses = (cast(Jagged, rows[name]) for name in ("prompt_ids", "response_ids"))
        return CallResult({"ref_log_probs": Jagged(prompts.values + responses.values, prompts.lengths)})


class SharedProcess(MetRanks):
    """Ranks that serve in one process, and are always at the same call."""

    def exchange(self, own: Endpoint, details: dict[str, Any]) -> list[dict[str, Any]]:
        self.endpoints.insert(0, own)
        return [details] * len(self.endpoints)


@contextlib.asynccontextmanager
async def serving(mesh: Mesh, arena_mb: int = 1) -> AsyncIterator[list[RankServer]]:
    """All ranks of a mesh; the first is started last, and so knows the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    table = ReferenceTable(
        role="reference", address=f"127.0.0.1:{port}", model=Path(), ranks=mesh.size, arena_mb=arena_mb
    )
    endpoints: list[Endpoint] = []
    servers, runs = [], []
    for rank in reversed(range(mesh.size)):
        ranks = SharedProcess(rank, mesh.size, 1, endpoints=endpoints, model_mesh=mesh)
        servers.insert(0, RankServer(Echo(table, ranks)))
        runs.append(asyncio.ensure_future(servers[0].serve()))
        while len(endpoints) < len(servers):
            assert not runs[-1].done(), runs[-1]
            await asyncio.sleep(0)
    try:
        yield servers
    finally:
        for server in servers:
            server._stop.set()
        await asyncio.wait_for(asyncio.gather(*runs), TIMEOUT_S)


def with_ranks(mesh: Mesh, use: Callable[[list[RankServer]], T], arena_mb: int = 1) -> T:
    """Result of `use`, on a thread of its own, with the ranks of a mesh."""

    async def main() -> T:
        async with serving(mesh, arena_mb) as servers:
            return await asyncio.wait_for(asyncio.to_thread(use, servers), TIMEOUT_S)

    return asyncio.run(main())


@contextlib.contextmanager
def connected(servers: list[RankServer], session: Session) -> Iterator[ReferenceGroup]:
    """A group of the ranks that serve."""
    with contextlib.closing(Loop()) as loop:

        async def connect() -> tuple[list[RankClient], worker_pb2.DescribeResponse]:
            first = RankClient("reference", 0, servers[0].worker.table.address)
            description = await first.call(WORKER["Describe"], worker_pb2.DescribeRequest(), TIMEOUT_S)
            await first.close()
            addresses = [info.endpoint.address for info in description.ranks]
            return [
                RankClient("reference", rank, address, is_ours=True, session=session.name)
                for rank, address in enumerate(addresses)
            ], description

        clients, description = loop.run(connect(), TIMEOUT_S)
        try:
            ranks = ReferenceGroup(
                FanOut(clients, description.epoch), description, frozenset({"0"}), session, Placement(), loop
            )
            ranks.synchronize().records(TIMEOUT_S)  # the first call begins the session
            yield ranks
        finally:
            for client in clients:
                loop.run(client.close(), TIMEOUT_S)


def rows() -> tuple[Batch, np.ndarray]:
    """Rows that the controller holds, and what the ranks make of them."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(0, 40, ROWS).astype(np.int64)
    prompts, responses = (rng.integers(0, 1000, lengths.sum()) for _ in range(2))
    batch = Batch.of(prompt_ids=Jagged(prompts, lengths), response_ids=Jagged(responses, lengths))
    return batch, prompts + responses


def test_what_the_controller_sends_does_not_grow_with_the_ranks_that_share_a_part() -> None:
    batch, expected = rows()

    def call(servers: list[RankServer]) -> tuple[int, np.ndarray]:
        session = Session(timeout_s=TIMEOUT_S)
        with (
            connected(servers, session) as ranks,
            contextlib.closing(Fetcher(host_id(), create_readers())) as fetcher,
        ):
            made = ranks.call("compute_ref_log_prob", FutureBatch.of(**values_of(batch)), temperature=1.0)
            result = made.result(["ref_log_probs"], TIMEOUT_S)
            fetched = fetcher.fetch(result, time.monotonic() + TIMEOUT_S)
            inline = [r.outcome.timing.inline_bytes for r in made.records()[0].responses]
            assert sum(inline) in (0, session.newest.controller_bytes)
            return session.newest.controller_bytes, cast(Jagged, fetched["ref_log_probs"]).values.copy()

    counted = {mesh: with_ranks(mesh, call) for mesh in MESHES}
    for _, values in counted.values():
        np.testing.assert_array_equal(values, expected)
    assert {sent for sent, _ in counted.values()} == {batch.nbytes}


def values_of(batch: Batch) -> dict[str, Any]:
    return {name: column.values for name, column in batch.columns.items() if isinstance(column, LocalColumn)}


def test_a_call_whose_turn_never_comes_gives_up_and_the_next_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "LATE_S", 0.0)

    def call(servers: list[RankServer]) -> None:
        with connected(servers, Session(timeout_s=TIMEOUT_S)) as ranks:
            stuck = ranks._placement.enter(frozenset({"0"}), "another service", 0.0)
            ranks.session.timeout_s = 0.1
            with pytest.raises(
                DeadlineExceeded,
                match=r"reference.synchronize waited 0\.2 s for the calls before it on its devices",
            ):
                ranks.synchronize().records(TIMEOUT_S)
            missing: Future[Column] = Future()
            batch = FutureBatch(1, {"prompt_ids": missing, "response_ids": missing})
            with pytest.raises(DeadlineExceeded, match=r"for columns \['prompt_ids', 'response_ids'\]"):
                ranks.call("compute_ref_log_prob", batch, temperature=1.0).records(TIMEOUT_S)
            ranks.session.timeout_s = TIMEOUT_S
            stuck.leave()
            ranks.synchronize().records(TIMEOUT_S)

    with_ranks(Mesh(1, 1, 1), call)


def test_shared_columns_are_freed_with_their_step() -> None:
    batch, _ = rows()

    def call(servers: list[RankServer]) -> None:
        session = Session(timeout_s=TIMEOUT_S)
        with connected(servers, session) as ranks:
            step = session.begin_step(1)
            ranks.call("compute_ref_log_prob", FutureBatch.of(**values_of(batch)), temperature=1.0).records()
            # The two columns, and the answer, on the rank that gives it.
            assert [server.store.stat().shards for server in servers] == [3, 0]
            ranks.release(step).result(TIMEOUT_S)
            assert [server.store.stat().shards for server in servers] == [0, 0]

    with_ranks(Mesh(1, 2, 1), call)


def test_shared_columns_that_do_not_fit_are_an_error_that_says_what_to_raise() -> None:
    many = Jagged(np.zeros(1 << 18, np.int64), np.array([1 << 18]))

    def call(servers: list[RankServer]) -> None:
        with connected(servers, Session(timeout_s=TIMEOUT_S)) as ranks:
            made = ranks.call(
                "compute_ref_log_prob", FutureBatch.of(prompt_ids=many, response_ids=many), temperature=1.0
            )
            with pytest.raises(
                OutOfSpace, match=r"reference rank 0 .*2\.0 MiB do not fit .*: raise arena_mb"
            ):
                made.records(TIMEOUT_S)
            small, _ = rows()
            ranks.call("compute_ref_log_prob", FutureBatch.of(**values_of(small)), temperature=1.0).records()

    with_ranks(Mesh(1, 2, 1), call)


def test_rows_of_another_session_are_not_stored() -> None:
    def call(servers: list[RankServer]) -> None:
        with connected(servers, Session(timeout_s=TIMEOUT_S)) as ranks:
            request = transfer_pb2.PutRequest(session="stranger", step=1, batch=common_pb2.Batch())
            with pytest.raises(Refused, match="session 'stranger' is not open here"):
                ranks._loop.run(ranks.clients[0].put(request, TIMEOUT_S), TIMEOUT_S)
            assert servers[0].store.stat().shards == 0

    with_ranks(Mesh(1, 1, 1), call)


def test_token_ids_that_ranks_hold_do_not_come_to_the_controller() -> None:
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")
    lease, session = Lease("session", 1), Session()
    lengths = np.array([2, 1])
    ids = store.put_column(Jagged(np.arange(3), lengths), "int64", lease)
    values = store.put_column(Jagged(np.arange(3, dtype=np.float32), lengths), "float32", lease)
    columns: dict[str, Future[Any]] = {"response_ids": resolved(ids), "values": resolved(values)}
    batch = FutureBatch(2, columns) | FutureBatch.of(group=np.array([0, 1]))
    reader = ColumnReader(Fetcher("", [], store), session, TIMEOUT_S)
    fetched = reader.fetch(batch, "values", "group")
    assert (fetched["values"].values.tolist(), fetched["group"].tolist()) == ([0, 1, 2], [0, 1])
    with pytest.raises(InvalidRequest, match=r"run.fetch: column 'response_ids' holds int64 on the ranks"):
        reader.fetch(batch, "response_ids")
    store.close()


def test_texts_are_stored_and_fetched_as_they_are() -> None:
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")
    texts = ["2+2=", "", "Gruesse aus Köln", "日本語"]
    stored = wire.from_proto(wire.to_proto(store.put_batch(Batch.of(prompt=texts), Lease("session", 1))))
    fetched = Fetcher("", [], store).fetch(
        stored.take(np.array([3, 0, 2, 1, 0])), time.monotonic() + TIMEOUT_S
    )
    assert fetched["prompt"] == [texts[row] for row in (3, 0, 2, 1, 0)]
    assert "prompt" not in fetched.dtypes
    store.close()


def test_bytes_that_are_no_text_are_refused() -> None:
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")
    shard = store.put(np.array([0xC3, 0x28], np.uint8), Lease("session", 1))
    batch = Batch(1, {"prompt": RemoteColumn.of_shard(TEXT, (), np.array([2]), shard)})
    with pytest.raises(TransferError, match="not UTF-8"):
        Fetcher("", [], store).fetch(batch, time.monotonic() + TIMEOUT_S)
    fixed = wire.to_proto(Batch(2, {"prompt": RemoteColumn.of_shard(TEXT, (), 2, shard)}))
    with pytest.raises(InvalidRequest, match="'prompt': text by reference is a jagged column"):
        wire.from_proto(fixed)
    store.close()


def test_a_number_that_is_no_element_cannot_be_stored() -> None:
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")
    with pytest.raises(InvalidRequest, match="cannot be stored"):
        store.put_batch(Batch.of(x=np.array([1j])), Lease("session", 1))
    store.close()
