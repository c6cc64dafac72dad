"""Guarantees of every rank whatever its role, over real services: order, retries, refusals, cancellation, errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import AutoTokenizer

from integration.conftest import Task
from integration.harness import (
    POLICY_LOSS,
    SHARDED,
    TWO_STEPS,
    Cluster,
    Pending,
    Service,
    jagged,
)
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.registry import unavailable
from rlhf.contract import group_methods
from rlhf.errors import (
    STATUS_KEY,
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    Refused,
)
from rlhf.v1 import actor_pb2, worker_pb2
from services.models.tokenizers import vocabulary_hash

AT_ONCE_S = 0.5
SOON_S = 10.0
"""Longest a rank may take to end a call that failed or was cancelled."""
SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=4)
LONG_SAMPLING = actor_pb2.Sampling(temperature=50.0, max_new_tokens=56)
MANY_EPOCHS = actor_pb2.Schedule(epochs=500, mini_batches=1)


def prompts(count: int) -> Batch:
    return Batch.of(prompt=[f"{10 + i % 90}+{99 - i % 90}=" for i in range(count)])


def training_rows(count: int = 8) -> Batch:
    """Rows of different lengths with everything an update of the actor reads."""
    generator = np.random.default_rng(2)
    lengths = [1 + (3 * i) % 7 for i in range(count)]
    return Batch.of(
        prompt_ids=jagged([generator.integers(48, 58, 2 + i % 4) for i in range(count)], np.int64),
        response_ids=jagged([generator.integers(48, 58, n) for n in lengths], np.int64),
        log_probs=jagged([generator.normal(-2, 0.1, n) for n in lengths], np.float32),
        advantages=jagged([generator.normal(size=n) for n in lengths], np.float32),
    )


def update(service: Service, **options: Any) -> Pending:
    given = {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0, **options}
    return service.start("update_actor", training_rows(), **given)


def start_generation(service: Service) -> tuple[Pending, str]:
    """A generation that takes seconds, when every rank is at it; and its call id."""
    header = service.header()
    pending = service.start(
        "generate_sequences", prompts(4096), header=header, sampling=LONG_SAMPLING, timeout_s=100
    )
    for rank in service.ranks:
        service.watch_until(lambda status: status.phase == worker_pb2.PHASE_COMPUTING, rank)
    return pending, header.call_id


def start_update(service: Service) -> tuple[Pending, str]:
    """An update that takes seconds, when it has made some of its optimizer steps; and its call id."""
    header = service.header()
    pending = update(service, header=header, schedule=MANY_EPOCHS, timeout_s=100)
    service.watch_until(lambda status: status.done >= 2)
    return pending, header.call_id


Start = Callable[[Service], tuple[Pending, str]]


def test_describe_says_who_and_where_every_rank_is(actor: Service, task: Task) -> None:
    said = actor.description
    assert (said.role, said.service, said.rank, said.engine) == ("actor", "actor", 0, "fsdp, rollout hf")
    assert (said.mesh.pipeline, said.mesh.tensor, said.mesh.data) == (1, 1, 2)
    assert (said.threads, said.max_tokens) == (1, 64)
    assert said.epoch > 1e12, "milliseconds of Unix time"
    assert said.vocabulary_hash == vocabulary_hash(AutoTokenizer.from_pretrained(task.model))
    assert said.torch == torch.__version__
    assert dict(said.libraries) == {"transformers": transformers.__version__}
    assert said.gpu == ""
    assert said.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert said.cpu
    assert any("Offload" in limit for limit in said.limits)
    for rank in actor.ranks:
        other = actor.ask("Describe", rank)
        assert (other.rank, other.epoch, list(other.ranks)) == (rank, said.epoch, list(said.ranks))
    assert [info.position.data for info in said.ranks] == [0, 1]
    for read in (
        lambda info: info.endpoint.address,
        lambda info: info.endpoint.adverts["memfd"],
        lambda info: info.pid,
    ):
        assert len({read(info) for info in said.ranks} - {"", 0}) == 2


def test_describe_lists_the_methods_of_the_contract_with_their_protocols(cluster: Cluster) -> None:
    for name, table in cluster.config.services.items():
        with cluster.service(name) as service:
            served = {info.name: info.transfer_protocol for info in service.description.methods}
        # The ranks of an actor generate for others too.
        roles = [table.role, "rollout"] if table.role == "actor" else [table.role]
        declared = [method for role in roles for method in group_methods(role).values()]
        assert served == {m.path[1:]: m.spec.transfer_protocol for m in declared if m.spec}


def test_every_rank_is_healthy_and_lists_its_services(actor: Service) -> None:
    for rank in actor.ranks:
        channel = actor.channel(rank)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", *(f"rlhf.v1.{each}Service" for each in ("Actor", "Rollout", "Worker", "Transfer"))):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=AT_ONCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=5))
        assert {service.name for service in answer.list_services_response.service} == {
            "rlhf.v1.ActorService",
            "rlhf.v1.RolloutService",
            "rlhf.v1.WorkerService",
            "rlhf.v1.TransferService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }


@pytest.mark.parametrize("start", [start_generation, start_update])
def test_a_busy_rank_answers_at_once(actor: Service, start: Start) -> None:
    pending, call_id = start(actor)
    for rank in actor.ranks:
        began = time.monotonic()
        health: Any = health_pb2_grpc.HealthStub(actor.channel(rank))
        health.Check(health_pb2.HealthCheckRequest(), timeout=AT_ONCE_S)
        actor.ask("Describe", rank, timeout_s=AT_ONCE_S)
        status = actor.watch_until(lambda status: True, rank)
        assert not actor.ask("Cancel", rank, timeout_s=AT_ONCE_S, call_id="another").found
        assert time.monotonic() - began < AT_ONCE_S
        assert status.call_id == call_id
        assert status.phase == worker_pb2.PHASE_COMPUTING
    actor.cancel(call_id)
    pending.outcomes()


def test_cancel_ends_a_generation_on_every_rank(actor: Service) -> None:
    pending, call_id = start_generation(actor)
    began = time.monotonic()
    assert actor.cancel(call_id) == [True, True]
    assert [type(outcome) for outcome in pending.outcomes()] == [CallCancelled, CallCancelled]
    assert time.monotonic() - began < SOON_S
    actor.call("generate_sequences", prompts(2), sampling=SAMPLING)


def test_cancel_of_one_rank_ends_an_update_on_all_with_the_weights_as_before(
    actor: Service, tmp_path: Path
) -> None:
    versions, sha256 = actor.versions, actor.export(tmp_path / "before")
    pending, call_id = start_update(actor)
    assert actor.cancel(call_id, ranks=[1]) == [True]
    assert [type(outcome) for outcome in pending.outcomes()] == [CallCancelled, CallCancelled]
    assert actor.versions == versions
    assert actor.export(tmp_path / "after") == sha256


def test_cancel_does_not_find_what_has_ended(actor: Service) -> None:
    header = actor.header()
    actor.call("synchronize", header=header)
    assert actor.cancel(header.call_id) == [False, False]


def test_a_call_that_is_sent_again_runs_once(actor: Service) -> None:
    header, versions = actor.header(), actor.versions
    first = update(actor, header=header)
    joined = update(actor, header=header)
    again = update(actor, header=header) if first.responses() else None
    assert again is not None
    assert first.responses() == joined.responses() == again.responses()
    assert actor.versions == [version + 1 for version in versions]


def test_a_call_of_another_epoch_is_refused(actor: Service) -> None:
    stale = actor.header(epoch=actor.description.epoch - 1)
    for outcome in update(actor, header=stale).outcomes():
        assert isinstance(outcome, Refused)
        assert f"the service is in epoch {actor.description.epoch}" in str(outcome)


def test_calls_run_in_sequence_order_whatever_order_they_come_in(actor: Service) -> None:
    versions = actor.versions
    headers = [actor.header() for _ in range(3)]
    third, second, first = (update(actor, header=header) for header in reversed(headers))
    made = [pending.responses()[0].outcome.policy_version for pending in (first, second, third)]
    assert made == [versions[0] + 1, versions[0] + 2, versions[0] + 3]


def test_a_call_behind_a_missing_one_ends_at_its_deadline_and_says_so(actor: Service) -> None:
    missing = actor.header()
    began = time.monotonic()
    for outcome in actor.start("synchronize", timeout_s=1.5).outcomes():
        assert isinstance(outcome, DeadlineExceeded)
        assert f"call {missing.sequence}, which never came" in str(outcome)
    assert time.monotonic() - began < 2.5


def test_a_sequence_goes_on_once_the_missing_call_has_come(actor: Service) -> None:
    late = actor.header()
    actor.start("synchronize", timeout_s=1.0).outcomes()
    actor.call("synchronize", header=late)
    actor.call("synchronize")


def test_a_call_that_gave_up_waiting_does_not_hold_up_the_next(actor: Service) -> None:
    pending, call_id = start_update(actor)
    outcomes = actor.start("synchronize", timeout_s=1.0).outcomes()
    assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
    # The client's own deadline may end a call before the answer of its rank arrives.
    assert any("behind UpdateActor" in str(outcome) for outcome in outcomes)
    actor.cancel(call_id)
    pending.outcomes()
    actor.call("synchronize")


def test_an_update_past_its_deadline_is_undone_on_every_rank(actor: Service, tmp_path: Path) -> None:
    versions, sha256 = actor.versions, actor.export(tmp_path / "before")
    header = actor.header()
    update(actor, header=header, schedule=MANY_EPOCHS, timeout_s=2.0).outcomes()
    # Where the ranks took long to go back, the caller saw only that its time was up; they remember.
    outcomes = update(actor, header=header, schedule=MANY_EPOCHS).outcomes()
    # The rank whose clock is a bit behind is told by the other to stop, or that the other has failed.
    assert {type(outcome) for outcome in outcomes} <= {DeadlineExceeded, CallCancelled, PeerFailed}
    assert any("ran past its deadline" in str(outcome) for outcome in outcomes)
    assert actor.versions == versions
    assert actor.export(tmp_path / "after") == sha256


def test_a_new_session_supersedes_the_one_before_and_frees_its_rows(cluster: Cluster, actor: Service) -> None:
    actor.call("generate_sequences", prompts(4), sampling=SAMPLING)
    assert min(actor.used_bytes()) > 0
    with cluster.service("actor") as successor:
        assert actor.used_bytes() == [0, 0]
        for outcome in update(actor).outcomes():
            assert isinstance(outcome, Refused)
            assert actor.session in str(outcome)
        successor.call("synchronize")


def test_a_superseded_call_leaves_no_rows(cluster: Cluster, reference: Service) -> None:
    """A micro-batch is not interrupted: it ends when its session has gone already."""
    one_micro_batch = Batch.of(
        prompt_ids=jagged([[49] * 20] * 600, np.int64), response_ids=jagged([[50] * 4] * 600, np.int64)
    )
    pending = reference.start("compute_ref_log_prob", one_micro_batch, temperature=1.0)
    reference.watch_until(lambda status: status.done_of == 1)
    with cluster.service("reference") as successor:
        successor.call("synchronize")
        pending.outcomes()
        assert successor.used_bytes() == [0]


def test_release_frees_the_rows_of_steps_that_are_over(actor: Service) -> None:
    first, second = (
        actor.rows("generate_sequences", prompts(4), header=actor.header(step=step), sampling=SAMPLING)
        for step in (1, 2)
    )
    before = actor.used_bytes()
    freed = [actor.ask("Release", rank, session=actor.session, steps=[1]).freed_bytes for rank in actor.ranks]
    assert min(freed) > 0
    assert actor.used_bytes() == [b - f for b, f in zip(before, freed, strict=True)]
    assert actor.values(second, "response_ids").rows == 4
    with pytest.raises(Refused, match="was released"):
        actor.call("compute_log_prob", first, temperature=1.0)
    for rank in actor.ranks:
        actor.ask("Release", rank, session=actor.session, all_steps=True)
    assert actor.used_bytes() == [0, 0]


def test_rows_carry_checksums_where_the_service_is_told_to_compute_them(
    actor: Service, reference: Service
) -> None:
    """And they match: `values` verifies them."""
    generated = actor.rows("generate_sequences", prompts(4), sampling=SAMPLING)
    column = generated["response_ids"]
    assert isinstance(column, RemoteColumn)
    assert all(shard.checksums for shard in column.shards)
    assert actor.values(generated, "response_ids").rows == 4
    reference.introduce(actor)
    scored = reference.rows("compute_ref_log_prob", generated, temperature=1.0)["ref_log_probs"]
    assert isinstance(scored, RemoteColumn)
    assert not any(shard.checksums for shard in scored.shards)


def test_stat_says_why_transports_are_not_available(actor: Service) -> None:
    for rank in actor.ranks:
        assert dict(actor.ask("Stat", rank).unavailable_transports) == unavailable()


@pytest.mark.parametrize(
    ("method", "options", "dropped", "said"),
    [
        ("generate_sequences", {"sampling": SAMPLING}, "prompt", "column 'prompt' is missing"),
        ("generate_sequences", {}, "", "sampling"),
        (
            "generate_sequences",
            {"sampling": actor_pb2.Sampling(max_new_tokens=4)},
            "",
            "temperature must be finite and at least 1e-06",
        ),
        (
            "generate_sequences",
            {"sampling": actor_pb2.Sampling(temperature=1.0)},
            "",
            "max_new_tokens must be at least 1",
        ),
        ("compute_log_prob", {}, "", "temperature must be finite and at least 1e-06"),
        ("compute_log_prob", {"temperature": 1.0}, "response_ids", "column 'response_ids' is missing"),
        (
            "update_actor",
            {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0},
            "advantages",
            "column 'advantages' is missing",
        ),
        (
            "update_actor",
            {"loss": POLICY_LOSS, "schedule": TWO_STEPS},
            "",
            "temperature must be finite and at least 1e-06",
        ),
        ("update_actor", {"loss": POLICY_LOSS, "temperature": 1.0}, "", "schedule"),
        ("update_actor", {"schedule": TWO_STEPS, "temperature": 1.0}, "", "loss"),
        ("compute_loss", {}, "text", "column 'text' is missing"),
        ("save_checkpoint", {"directory": "somewhere"}, "", "format"),
        ("save_checkpoint", {"format": SHARDED}, "", "directory"),
        ("load_checkpoint", {}, "", "directory"),
        ("profile", {"calls": 1}, "", "directory"),
    ],
)
def test_a_request_that_lacks_something_is_invalid_and_says_what(
    actor: Service, method: str, options: dict[str, Any], dropped: str, said: str
) -> None:
    whole = training_rows() | Batch.of(prompt=["1+1="] * 8, text=["1+1=2"] * 8)
    spec = group_methods("actor")[method]
    takes_rows = bool(spec.inputs)
    batch = whole.select([name for name in spec.inputs if name != dropped]) if takes_rows else None
    for outcome in actor.start(method, batch, **options).outcomes():
        assert isinstance(outcome, InvalidRequest)
        assert said in str(outcome)


@pytest.mark.parametrize(("field", "said"), [("call_id", "call_id"), ("sequence", "sequence")])
def test_a_service_of_two_ranks_asks_for_an_order(actor: Service, field: str, said: str) -> None:
    header = actor.header()
    header.ClearField(field)  # type: ignore[arg-type]
    for outcome in actor.start("synchronize", header=header).outcomes():
        assert isinstance(outcome, InvalidRequest)
        assert said in str(outcome)


def test_rows_that_one_rank_cannot_have_fail_the_call_on_all(actor: Service) -> None:
    made = actor.rows("generate_sequences", prompts(4), sampling=SAMPLING)
    actor.ask("Release", 1, session=actor.session, all_steps=True)
    began = time.monotonic()
    refused = actor.start("compute_log_prob", made, temperature=1.0).outcomes()
    assert [type(outcome) for outcome in refused] == [PeerFailed, Refused]
    assert "rank 1" in str(refused[0])
    assert time.monotonic() - began < SOON_S
    actor.call("generate_sequences", prompts(4), sampling=SAMPLING)


SPOILT = {
    "empty prompt": ("prompt_ids", jagged([[49]] * 7 + [[]], np.int64)),
    "no such token": ("prompt_ids", jagged([[49]] * 7 + [[128]], np.int64)),
    "longer than the budget": ("prompt_ids", jagged([[49]] * 7 + [[49] * 20_000], np.int64)),
    "more advantages than tokens": ("advantages", jagged([[1.0] * 99] * 8, np.float32)),
}


@pytest.mark.parametrize(
    ("method", "spoilt"),
    [
        *(("update_actor", name) for name in SPOILT),
        *(("compute_log_prob", name) for name, (column, _) in SPOILT.items() if column == "prompt_ids"),
    ],
)
def test_a_row_that_one_rank_cannot_compute_fails_the_call_on_all(
    actor: Service, method: str, spoilt: str
) -> None:
    """Ranks that have begun to compute would wait in vain for one that has not."""
    column, values = SPOILT[spoilt]
    inputs = group_methods("actor")[method].inputs
    good = training_rows()
    bad = (good | Batch.of(**{column: values})).take(np.arange(7, 8))
    rows = Batch.concat([good.take(np.arange(7)), bad]).select(inputs)
    options: dict[str, Any] = {"temperature": 1.0}
    if method == "update_actor":
        options |= {"loss": POLICY_LOSS, "schedule": TWO_STEPS}
    began = time.monotonic()
    outcomes = actor.start(method, rows, **options).outcomes()
    assert [type(outcome) for outcome in outcomes] == [PeerFailed, InvalidRequest]
    assert time.monotonic() - began < SOON_S
    actor.call(method, good.select(inputs), **options)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (actor_pb2.PolicyLoss(kl_loss_coefficient=0.1), "ref_log_probs"),
        (actor_pb2.PolicyLoss(kl_loss_coefficient=0.1, kl_loss_estimator="k4"), "k4"),
        (actor_pb2.PolicyLoss(aggregation="mean"), "token-mean"),
        (actor_pb2.PolicyLoss(aggregation="seq-mean-token-sum-norm"), "max_response_tokens"),
        (actor_pb2.PolicyLoss(surrogate_options={"clip_low": 2.0}), "clip_low: must be at most 1"),
        (actor_pb2.PolicyLoss(surrogate_options={"dual_clip": 0.5}), "dual_clip: must be above 1"),
        (
            actor_pb2.PolicyLoss(surrogate_options={"clip_hihg": 0.5}),
            "loss.surrogate_options of ppo: clip_hihg: unknown key; did you mean 'clip_high'?",
        ),
    ],
)
def test_a_loss_that_cannot_be_is_refused_also_by_a_rank_without_rows(
    actor: Service, loss: actor_pb2.PolicyLoss, said: str
) -> None:
    row = training_rows(1)
    options = {"schedule": actor_pb2.Schedule(epochs=1, mini_batches=1), "temperature": 1.0}
    for outcome in actor.start("update_actor", row, loss=loss, **options).outcomes():
        assert isinstance(outcome, InvalidRequest)
        assert said in str(outcome)


def test_rows_released_during_an_update_change_it_on_all_ranks_or_on_none(
    actor: Service, tmp_path: Path
) -> None:
    versions, sha256 = actor.versions, actor.export(tmp_path / "before")
    rows = actor.rows("generate_sequences", prompts(8), sampling=SAMPLING)
    rows |= actor.rows("compute_log_prob", rows, temperature=1.0)
    rows |= Batch.of(advantages=actor.values(rows, "log_probs"))
    schedule = actor_pb2.Schedule(epochs=20, mini_batches=1)
    options = {"loss": POLICY_LOSS, "schedule": schedule, "temperature": 1.0}
    inputs = rows.select(["prompt_ids", "response_ids", "log_probs", "advantages"])
    pending = actor.start("update_actor", inputs, **options)
    actor.watch_until(lambda status: status.done >= 2)
    actor.ask("Release", 1, session=actor.session, all_steps=True)
    assert [type(outcome) for outcome in pending.outcomes()] == [PeerFailed, Refused]
    assert actor.versions == versions
    assert actor.export(tmp_path / "after") == sha256


def test_a_call_that_a_dead_controller_left_with_one_rank_does_not_stop_the_next_controller(
    actor: Service, tmp_path: Path
) -> None:
    before = actor.export(tmp_path / "before")
    options = {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}
    rows = training_rows()
    stale = actor.send("update_actor", {0: actor.requests("update_actor", rows, **options)[0]})
    actor.watch_until(lambda status: status.method == "UpdateActor")
    successor = Service("actor", actor.addresses[0])
    assert successor.export(tmp_path / "after") == before
    assert [type(outcome) for outcome in stale.outcomes()] == [Refused]
    successor.call("update_actor", rows, **options)
    assert successor.versions == [1, 1]
    successor.close()


def test_a_profile_is_a_trace_of_the_next_calls_on_every_rank(actor: Service, tmp_path: Path) -> None:
    armed = actor.call("profile", directory=str(tmp_path), calls=2)
    for _ in range(2):
        assert not list(tmp_path.iterdir())
        actor.call(
            "compute_log_prob", training_rows().select(["prompt_ids", "response_ids"]), temperature=1.0
        )
    paths = {Path(response.path) for response in armed}
    assert paths == set(tmp_path.iterdir())
    assert len(paths) == 2
    for path in paths:
        assert any("aten::" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])


def test_errors_carry_who_where_and_the_remote_traceback(actor: Service) -> None:
    header = actor.header()
    pending = actor.start("compute_log_prob", training_rows(), header=header, temperature=-1.0)
    for rank, future in enumerate(pending.futures):
        with pytest.raises(grpc.RpcError) as raised:
            future.result()
        error: Any = raised.value
        trailing = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(trailing[STATUS_KEY])
        info, debug = error_details_pb2.ErrorInfo(), error_details_pb2.DebugInfo()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(debug)
        assert (info.domain, info.reason) == ("rlhf-cluster", "InvalidRequest")
        assert dict(info.metadata) == {
            "service": "actor",
            "role": "actor",
            "rank": str(rank),
            "method": "ComputeLogProb",
            "call_id": header.call_id,
        }
        assert "services/actor/worker.py" in "".join(debug.stack_entries)
        assert "InvalidRequest: temperature" in "".join(debug.stack_entries)


def test_an_older_session_cannot_take_the_service_back(lone_actor: Service) -> None:
    lone_actor.call("synchronize")
    old = lone_actor.header(session="older", sequence=1, session_started_unix_ns=1)
    with pytest.raises(Refused, match=r"session 'older' was superseded by"):
        lone_actor.call("synchronize", header=old)
