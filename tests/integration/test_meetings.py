"""Calls that some ranks are not sent, or that nobody waits for any more, fail, and the service goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration.harness import HUGGING_FACE, POLICY_LOSS, TWO_STEPS, Service
from integration.test_server import (
    MANY_EPOCHS,
    SOON_S,
    prompts,
    start_generation,
    start_update,
    training_rows,
)
from rlhf.errors import CallCancelled, DeadlineExceeded, InvalidRequest, PeerFailed, Refused, RlhfError
from rlhf.v1 import actor_pb2, worker_pb2
from services.runtime.turn_queue import MISSING_S

SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=4)
UPDATE: dict[str, Any] = {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}


def assert_right(actor: Service, directory: Path) -> None:
    """Two calls with collectives do what they do on a service that nothing has happened to."""
    versions = actor.versions
    actor.call("update_actor", training_rows(), **UPDATE)
    assert actor.versions == [version + 1 for version in versions]
    actor.export(directory / "after")


def reached(actor: Service) -> None:
    """Returns when every rank has got what was sent to it before."""
    for rank in actor.ranks:
        actor.ask("Describe", rank)


@pytest.mark.parametrize("method", ["save_checkpoint", "offload", "update_actor"])
def test_a_call_that_one_rank_is_not_sent_fails_at_its_deadline_and_later_ones_are_right(
    actor: Service, tmp_path: Path, method: str
) -> None:
    options: dict[str, Any] = {
        "save_checkpoint": {"directory": str(tmp_path / "lone"), "format": HUGGING_FACE},
        "update_actor": {"batch": training_rows(), **UPDATE},
    }.get(method, {})
    for rank in actor.ranks:
        service, began = Service("actor", actor.addresses[0]), time.monotonic()
        requests = service.requests(method, **options)
        (outcome,) = service.send(method, {rank: requests[rank]}, timeout_s=1.0).outcomes()
        assert type(outcome) is DeadlineExceeded
        assert "not every rank was sent it" in str(outcome)
        assert time.monotonic() - began < 2.0
        # The number of the call is taken on one rank only, until the others are sent it too.
        assert type(service.send(method, {1 - rank: requests[1 - rank]}).outcomes()[0]) is PeerFailed
        assert not (tmp_path / "lone").exists()
        assert_right(service, tmp_path)
        service.close()


def test_a_rank_computes_once_every_rank_is_ready(actor: Service, tmp_path: Path) -> None:
    rows = training_rows().select(["prompt_ids", "response_ids"])
    requests = actor.requests("compute_log_prob", rows, temperature=1.0)
    first = actor.send("compute_log_prob", {0: requests[0]})
    statuses = [actor.watch_until(lambda status: status.method == "ComputeLogProb", 0) for _ in range(5)]
    assert {status.phase for status in statuses} == {worker_pb2.PHASE_FETCHING}
    second = actor.send("compute_log_prob", {1: requests[1]})
    assert not any(isinstance(outcome, Exception) for outcome in [*first.outcomes(), *second.outcomes()])
    assert_right(actor, tmp_path)


def test_sessions_that_reach_one_rank_only_do_not_stop_the_next(actor: Service, tmp_path: Path) -> None:
    """Ranks are left at calls of sessions that the others know nothing of."""
    for rank in (1, 0, 1, 1):
        lone = Service("actor", actor.addresses[0])
        (outcome,) = lone.send("offload", {rank: lone.requests("offload")[rank]}, timeout_s=0.5).outcomes()
        assert type(outcome) is DeadlineExceeded
        lone.close()
    successor = Service("actor", actor.addresses[0])
    assert_right(successor, tmp_path)
    successor.close()


def test_a_rank_that_comes_to_a_call_whose_peer_has_given_it_up_is_told_so(
    actor: Service, tmp_path: Path
) -> None:
    requests = actor.requests("offload")
    actor.send("offload", {1: requests[1]}, timeout_s=0.5).outcomes()
    began = time.monotonic()
    (late,) = actor.send("offload", {0: requests[0]}).outcomes()
    assert type(late) is PeerFailed
    assert time.monotonic() - began < SOON_S
    assert_right(actor, tmp_path)


def test_a_call_that_times_out_in_the_queue_of_one_rank_fails_on_the_one_that_begins_it(
    actor: Service, tmp_path: Path
) -> None:
    running, call_id = start_update(actor)
    requests = actor.requests(
        "compute_log_prob", training_rows().select(["prompt_ids", "response_ids"]), temperature=1.0
    )
    impatient = actor.send("compute_log_prob", {0: requests[0]}, timeout_s=0.5)
    patient = actor.send("compute_log_prob", {1: requests[1]})
    assert type(impatient.outcomes()[0]) is DeadlineExceeded
    actor.cancel(call_id)
    running.outcomes()
    assert_right(actor, tmp_path)
    assert type(patient.outcomes()[0]) is PeerFailed


@pytest.mark.parametrize("field", ["call_id", "temperature"])
def test_ranks_that_are_sent_different_requests_compute_neither(
    actor: Service, tmp_path: Path, field: str
) -> None:
    header, rows = actor.header(), training_rows().select(["prompt_ids", "response_ids"])
    changed = actor.header(sequence=header.sequence) if field == "call_id" else header
    actor.sequence = header.sequence
    one = actor.requests("compute_log_prob", rows, header=header, temperature=1.0)[0]
    other = actor.requests("compute_log_prob", rows, header=changed, temperature=2.0)[1]
    if field == "call_id":
        other.temperature = 1.0
    outcomes = actor.send("compute_log_prob", {0: one, 1: other}).outcomes()
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest, InvalidRequest]
    assert "a different request with the same sequence number" in str(outcomes[0])
    assert_right(actor, tmp_path)


@pytest.mark.parametrize("start", [start_generation, start_update])
def test_calls_whose_client_has_cancelled_them_hold_up_no_other(
    actor: Service, tmp_path: Path, start: Any
) -> None:
    """The running one and those behind it."""
    running, _ = start(actor)
    versions = actor.versions
    behind = [
        actor.start("update_actor", training_rows(), **{**UPDATE, "schedule": MANY_EPOCHS}) for _ in range(4)
    ]
    reached(actor)
    for pending in (running, *behind):
        for future in pending.futures:
            future.cancel()
    began = time.monotonic()
    actor.call("generate_sequences", prompts(2), sampling=SAMPLING)
    assert time.monotonic() - began < SOON_S
    assert actor.versions == versions
    assert_right(actor, tmp_path)


def test_a_lone_call_whose_client_has_cancelled_it_holds_up_no_other(actor: Service, tmp_path: Path) -> None:
    requests = actor.requests("offload")
    lone = actor.send("offload", {1: requests[1]}, timeout_s=300)
    actor.watch_until(lambda status: status.method == "Offload", rank=1)
    lone.futures[0].cancel()
    began = time.monotonic()
    actor.send("offload", {0: requests[0]}).outcomes()
    assert_right(actor, tmp_path)
    assert time.monotonic() - began < SOON_S


def test_a_caller_that_leaves_does_not_end_a_call_that_another_waits_for(actor: Service) -> None:
    header = actor.header()
    options = {**UPDATE, "schedule": actor_pb2.Schedule(epochs=20, mini_batches=1), "header": header}
    versions = actor.versions
    first = actor.start("update_actor", training_rows(), **options)
    second = actor.start("update_actor", training_rows(), **options)
    actor.watch_until(lambda status: status.done >= 1)
    for future in first.futures:
        future.cancel()
    second.responses()
    assert actor.versions == [version + 1 for version in versions]


def test_what_became_of_a_call_can_be_asked_for_after_its_deadline(actor: Service) -> None:
    """By its id: its callers have left, and the ranks have ended it, all of which had begun by then."""
    header = actor.header()
    options = {**UPDATE, "schedule": MANY_EPOCHS, "header": header}
    for future in actor.start("update_actor", training_rows(), timeout_s=3.0, **options).futures:
        with pytest.raises(grpc.RpcError):
            future.result()
    outcomes = actor.start("update_actor", training_rows(), **options).outcomes()
    again = actor.start("update_actor", training_rows(), **options).outcomes()
    assert {type(outcome) for outcome in outcomes} <= {DeadlineExceeded, CallCancelled}
    assert [str(outcome) for outcome in again] == [str(outcome) for outcome in outcomes]
    assert all(isinstance(outcome, RlhfError) for outcome in outcomes)


@pytest.mark.parametrize("method", ["update_actor", pytest.param("profile", marks=pytest.mark.full)])
def test_a_call_that_is_lost_on_its_way_to_one_rank_holds_up_later_ones_for_a_few_seconds(
    actor: Service, tmp_path: Path, method: str
) -> None:
    """Until then it may still come, and later calls wait for it; then they go on without it."""
    options: dict[str, Any] = {
        "update_actor": {"batch": training_rows(), **UPDATE},
        "profile": {"directory": str(tmp_path), "calls": 1},
    }[method]
    for rank in actor.ranks:
        service = Service("actor", actor.addresses[0])
        service.call("synchronize")
        requests = service.requests(method, **options)
        lost = service.send(method, {rank: requests[rank]})
        began = time.monotonic()
        assert_right(service, tmp_path)
        assert time.monotonic() - began < MISSING_S + SOON_S
        (outcome,) = lost.outcomes()
        if method == "update_actor":
            assert type(outcome) is PeerFailed
            assert f"rank {1 - rank} has not received this call and is at a later call of the session" in str(
                outcome
            )
        (late,) = service.send(method, {1 - rank: requests[1 - rank]}).outcomes()
        assert type(late) is Refused
        service.close()
