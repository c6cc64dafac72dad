"""What the data plane moved in a step, as metrics."""

from __future__ import annotations

import pytest

from controller.role_groups.dataflow import CallRecord
from controller.tracking.transfer import transfer_metrics
from nccl_transfer.transports import Traffic, traffic_since, traffic_to_proto
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


def test_what_was_moved_between_two_counts_leaves_out_what_did_not_move() -> None:
    before = {"memfd": Traffic(10, 1.0, 1), "tcp": Traffic(5, 1.0, 1)}
    now = {"memfd": Traffic(30, 1.5, 3), "tcp": Traffic(5, 1.0, 1), "nccl": Traffic(7, 1.0, 1)}
    assert traffic_since(now, before) == {"memfd": Traffic(20, 0.5, 2), "nccl": Traffic(7, 1.0, 1)}
