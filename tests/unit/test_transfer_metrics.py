"""Traffic of the data plane: of each fetch, and as metrics of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from controller.role_groups.dataflow import CallRecord
from controller.tracking.transfer import transfer_metrics
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.transfer_service import traffic_to_proto
from nccl_transfer.transports import Reader, Reading, Traffic
from rlhf.v1 import actor_pb2


def response(**moved: Traffic) -> actor_pb2.UpdateActorResponse:
    answer = actor_pb2.UpdateActorResponse()
    for name, message in traffic_to_proto(moved).items():
        answer.outcome.timing.traffic[name].CopyFrom(message)
    return answer


def record(service: str, *responses: actor_pb2.UpdateActorResponse) -> CallRecord:
    return CallRecord(service, "update", 0.0, 1.0, {}, 1, responses)


def test_bytes_and_seconds_add_up_over_ranks_and_calls_and_give_the_rate() -> None:
    records = [
        record("actor", response(memfd=Traffic(3_000, 1e-6, 1)), response(memfd=Traffic(1_000, 3e-6, 2))),
        record("critic", response(memfd=Traffic(4_000, 4e-6, 1), tcp=Traffic(500, 0.5, 1))),
        record("reward", response()),
    ]
    assert transfer_metrics(records) == {
        "transfer/memfd/bytes": 8_000.0,
        "time/transfer/memfd/seconds": pytest.approx(8e-6),
        "transfer/memfd/transfers": 4.0,
        "time/transfer/memfd/gb_per_s": pytest.approx(1.0),
        "transfer/tcp/bytes": 500.0,
        "time/transfer/tcp/seconds": 0.5,
        "transfer/tcp/transfers": 1.0,
        "time/transfer/tcp/gb_per_s": pytest.approx(1e-6),
        "transfer/actor.update/bytes": 4_000.0,
        "time/transfer/actor.update/seconds": pytest.approx(4e-6),
        "time/transfer/actor.update/gb_per_s": pytest.approx(1.0),
        "transfer/critic.update/bytes": 4_500.0,
        "time/transfer/critic.update/seconds": pytest.approx(0.500004),
        "time/transfer/critic.update/gb_per_s": pytest.approx(4_500 / 0.500004 / 1e9),
    }


class HeldReader(Reader):
    """Reads zeros; its first read waits until another has ended."""

    name = "held"

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def why_not(self, source: Endpoint, host_id: str) -> None:
        return None

    def check_advert(self, advert: bytes) -> None:
        pass

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        if not self.begun.is_set():
            self.begun.set()
            assert self.released.wait(20)
        return Reading([memoryview(bytes(r.nbytes)) for r in ranges])

    def close(self) -> None:
        self.released.set()


def test_the_traffic_of_a_fetch_is_its_own_also_beside_another() -> None:
    transport = HeldReader()
    fetcher = Fetcher("host", [transport])
    column = RemoteColumn.of_shard("int64", (), np.array([1]), Shard(Endpoint("10.0.0.1:7101"), 1, 64, 8))
    batch = Batch(1, {"ids": column})
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(fetcher.fetch, batch, time.monotonic() + 20)
        assert transport.begun.wait(20)
        beside = fetcher.fetch(batch, time.monotonic() + 20)
        transport.released.set()
        for rows in (beside, held.result(20)):
            assert rows.traffic.keys() == {"held"}
            assert (rows.traffic["held"].bytes, rows.traffic["held"].transfers) == (8, 1)
    assert fetcher.traffic()["held"].bytes == 16
    fetcher.close()
