"""A rank connects to the ranks of its own service and to those that the session introduced, and to no others."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client.rank import RankClient
from integration.harness import Service, jagged
from integration.test_server import SOON_S, prompts, start_generation
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.transports.tcp_wire import ADVERT
from rlhf.contract import group_methods
from rlhf.errors import InvalidRequest, PeerFailed, Refused
from rlhf.v1 import actor_pb2

pytestmark = pytest.mark.timeout(120)

SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=4)
LONG_S = 90.0
"""Deadline of calls that would wait for an address where nobody answers."""


def adverts(port: int) -> dict[str, bytes]:
    """The adverts of a rank with this data port alone."""
    return {"tcp": ADVERT.pack(port, bytes(16))}


def rows_at(endpoint: Endpoint, rows: int = 4) -> Batch:
    """Rows that a rank there is said to hold."""
    shard = Shard(endpoint, 1, 64, 8 * rows)
    column = RemoteColumn.of_shard("int64", (), np.ones(rows, np.int64), shard)
    return Batch(rows, {"prompt_ids": column, "response_ids": column})


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_call_that_names_a_stranger_is_refused_at_once_while_another_goes_on(
    actor: Service, silent: socket.socket
) -> None:
    running, call_id = start_generation(actor)
    stranger = Endpoint(address_of(silent), service="stranger", adverts=adverts(silent.getsockname()[1]))
    refused = actor.start("compute_log_prob", rows_at(stranger), temperature=1.0, timeout_s=LONG_S)
    for outcome in refused.outcomes():
        assert type(outcome) is InvalidRequest
        assert f"has not introduced the endpoint stranger rank 0 at {address_of(silent)} to this rank" in str(
            outcome
        )
    assert not any(future.done() for future in running.futures)
    actor.cancel(call_id)
    running.outcomes()
    with pytest.raises(BlockingIOError):
        silent.accept()
    actor.call("generate_sequences", prompts(2), sampling=SAMPLING)


def test_a_call_behind_one_that_names_a_stranger_does_not_wait(
    reference: Service, silent: socket.socket
) -> None:
    began = time.monotonic()
    stranger = Endpoint(address_of(silent), adverts=adverts(silent.getsockname()[1]))
    for _ in range(3):
        pending = reference.start(
            "compute_ref_log_prob", rows_at(stranger), temperature=1.0, timeout_s=LONG_S
        )
        reference.call("synchronize")
        assert type(pending.outcomes()[0]) is InvalidRequest
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("address", ["unix:/run/other.sock", "unix:7101", "203.0.113.1:9", "203.0.113.1"])
def test_an_address_is_refused_by_its_name(reference: Service, address: str) -> None:
    with pytest.raises(InvalidRequest, match=address):
        reference.call("compute_ref_log_prob", rows_at(Endpoint(address)), temperature=1.0, timeout_s=LONG_S)
    if address != "203.0.113.1:9":
        with pytest.raises(InvalidRequest, match=f"{address}'.*(host:port|kind of an address)"):
            reference.ask("Introduce", session=reference.session, endpoints=[{"address": address}])


def test_rows_of_another_service_are_read_once_its_ranks_are_introduced_by_this_session(
    actor: Service, reference: Service
) -> None:
    made = actor.rows("generate_sequences", prompts(4), sampling=SAMPLING)
    ids = made["response_ids"]
    assert isinstance(ids, RemoteColumn)
    holder = ids.shards[0].endpoint

    def score(service: Service, batch: Batch = made) -> list[Any]:
        return service.call("compute_ref_log_prob", batch, temperature=1.0, timeout_s=LONG_S)

    with pytest.raises(InvalidRequest, match=holder.address):
        score(reference)
    with pytest.raises(Refused, match="session 'another' is not open on this rank"):
        reference.ask("Introduce", session="another", endpoints=[actor.description.ranks[0].endpoint])
    reference.introduce(actor)
    score(reference)
    for changes in (
        {"adverts": {**holder.adverts, "memfd": b"another"}},
        {"adverts": adverts(9)},
        {"epoch": 1},
    ):
        with pytest.raises(InvalidRequest, match="a different endpoint with this address is known"):
            score(reference, rows_at(replace(holder, **changes)))
    score(reference)
    successor = Service("reference", reference.addresses[0])
    with pytest.raises(InvalidRequest, match=holder.address):
        score(successor)
    successor.introduce(actor)
    score(successor)
    successor.close()


def test_a_call_that_names_a_stranger_on_one_rank_only_holds_up_none_of_them(
    actor: Service, silent: socket.socket
) -> None:
    ids = jagged([[50, 51]] * 4, np.int64)
    good = Batch.of(prompt_ids=ids, response_ids=ids)
    header, began = actor.header(), time.monotonic()
    near = actor.requests("compute_log_prob", good, header=header, temperature=1.0)
    far = actor.requests(
        "compute_log_prob", rows_at(Endpoint(address_of(silent))), header=header, temperature=1.0
    )
    pending = actor.send("compute_log_prob", {0: near[0], 1: far[1]}, timeout_s=LONG_S)
    actor.call("compute_log_prob", good, temperature=1.0)
    assert [type(outcome) for outcome in pending.outcomes()] == [PeerFailed, InvalidRequest]
    assert time.monotonic() - began < SOON_S


def test_a_call_over_a_stream_is_refused_alike(actor: Service, silent: socket.socket) -> None:
    method = group_methods("actor")["compute_log_prob"]
    requests = actor.requests(method.snake_name, rows_at(Endpoint(address_of(silent))), temperature=1.0)

    async def main() -> list[Any]:
        clients = [
            RankClient("actor", rank, address, is_ours=True, session=actor.session)
            for rank, address in enumerate(actor.addresses)
        ]
        calls = [c.start(method, request, LONG_S) for c, request in zip(clients, requests, strict=True)]
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            for client in clients:
                await client.close()

    for outcome in asyncio.run(main()):
        assert isinstance(outcome, InvalidRequest), outcome
        assert address_of(silent) in str(outcome)
