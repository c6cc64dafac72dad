"""Calls of a stranger to one rank of a service, or to all: no rank ends, grows or is locked, errors have the codes of
the contract, and a run computes afterwards what it computed before.

Other tests hold parts of this: hostile batches and data ports (unit/test_hostile_messages.py), paths
(integration/test_output_roots.py), sessions and clocks (integration/test_sessions.py, unit/test_sessions.py), calls
that only some ranks are sent or whose client has left (integration/test_meetings.py), requests that lack something
(integration/test_server.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from chaos.fuzzing import Fuzzer, Results
from chaos.growth import GROWTH, Usage, growth
from chaos.nasty import MAX_UINT64
from chaos.shots import HOUR_NS, rpcs
from chaos.targets import FREE_WITHIN_S, Target, started
from chaos.valid_requests import SAMPLING

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import ActorGroup
from integration.harness import SHARDED, Service
from integration.test_sessions import connected
from nccl_transfer.refs import wire
from rlhf.contract import SERVICES, group_methods
from rlhf.errors import Refused
from rlhf.v1 import actor_pb2, common_pb2, reward_pb2, worker_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CALLS = 1_200
ROUNDS = 3
"""Most rounds of CALLS until one leaves no more open than there was before it."""
SHORT_S = 4.0
"""Time for connections to go, in seconds, before another round is begun."""
RANKS = 2


@pytest.fixture(scope="module")
def targets(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    services: dict[str, tuple[str, int, dict[str, Any]]] = {
        "actor": ("actor", RANKS, {"model": str(model), "engine": "fsdp", "micro_batch_tokens": 64,
                                   "optimizer": {"learning_rate": 1e-3}}),
        "reward": ("reward", 1, {"function": "chaos.chaos_plugins:score"}),
    }  # fmt: skip
    with started(services, tmp_path_factory.mktemp("abuse")) as made:
        yield made


@pytest.fixture(params=["actor", pytest.param("reward", marks=pytest.mark.full)])
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Iterator[Target]:
    """A service, which after the test is as it was before."""
    target = targets[request.param]
    yield target
    target.check()
    assert target.compute() == target.numbers


@pytest.fixture
def actor(targets: dict[str, Target]) -> Iterator[Target]:
    target = targets["actor"]
    yield target
    target.check()
    assert target.compute() == target.numbers


def seed() -> int:
    """The same every time, unless CHAOS_SEED says another; `make fuzz` draws new ones."""
    drawn = int(os.environ.get("CHAOS_SEED", "20261123"))
    print(f"CHAOS_SEED={drawn}", flush=True)
    return drawn


def attacks(
    target: Target, count: int, seed: int, directory: Path, *, is_guest: bool = False
) -> Counter[str]:
    """Sends random calls, many at a time; returns how many ended with which code."""

    async def send() -> Results:
        async with Fuzzer([target.service], seed, directory, is_guest=is_guest) as fuzzer:
            await fuzzer.run(count)
            return fuzzer.results

    results = uvloop.run(send())
    results.check()
    return results.codes


@pytest.mark.full
def test_random_calls_leave_a_service_as_it_was(target: Target, tmp_path: Path) -> None:
    """Ranks keep freed memory (`keep_freed_memory`), and a connection to each rank that they have read from, so growth
    is counted after many calls. gRPC's pools add threads now and then; a leak grows in every round."""
    drawn, more = seed(), ""
    attacks(target, CALLS // 2, drawn, tmp_path)
    for number in range(1, ROUNDS + 1):
        before = Usage.of(target)
        codes = attacks(target, CALLS, drawn + number, tmp_path)
        print(f"{target.role}: {dict(codes)}", flush=True)
        target.check()
        if not (more := growth(target, before, FREE_WITHIN_S if number == ROUNDS else SHORT_S)):
            break
    assert not more


def test_a_run_goes_on_beside_random_calls(actor: Target, tmp_path: Path) -> None:
    """Its controller is there, so strangers that do not say that they take over have no turn."""
    table = {name: value for name, value in actor.table.items() if name != "ranks"} | {"ranks": RANKS}
    config = Config.model_validate({
        "run": {"directory": tmp_path, "steps": 1, "call_timeout_s": 60.0},
        "data": {"train": tmp_path, "heldout": tmp_path},
            "rollout": {"max_response_tokens": 6},
        "services": {"actor": table},
    })  # fmt: skip
    actor.session().close()
    reader = Service("actor", actor.address)
    sequences, _ = actor.valid["compute_log_prob"]
    assert sequences is not None
    ids: dict[str, Any] = {name: column.values for name, column in sequences.columns.items()}  # pyright: ignore[reportAttributeAccessIssue]

    def log_probs(run: Cluster) -> list[float]:
        group = run.group("actor")
        assert isinstance(group, ActorGroup)
        rows = group.compute_log_prob(FutureBatch.of(**ids), 1.0).result(["log_probs"], 60.0)
        return reader.values(rows, "log_probs").values.tolist()

    with connected(config, Session(seed=3)) as run:
        expected = log_probs(run)
        codes = attacks(actor, 400, seed(), tmp_path / "bad", is_guest=True)
        assert codes["FAILED_PRECONDITION"]
        assert log_probs(run) == expected
    reader.close()


def header(target: Target, **changes: Any) -> common_pb2.Call:
    """Of the first call of a session of its own."""
    given = {"call_id": uuid.uuid4().hex, "session": uuid.uuid4().hex, "sequence": 1, "take_over": True,
             "session_started_unix_ns": target.next_start()}  # fmt: skip
    return common_pb2.Call(**{**given, **changes})


def synchronize(target: Target, **changes: Any) -> worker_pb2.SynchronizeRequest:
    return worker_pb2.SynchronizeRequest(call=header(target, **changes))


def batch(target: Target, method: str, **options: Any) -> Any:
    """A request to one rank with all rows."""
    rows, given = target.valid[method]
    assert rows is not None
    contract = group_methods(target.role)[method]
    return contract.request(call=header(target), batch=wire.to_proto(rows), **{**given, **options})


def a_start_at_the_end_of_time(target: Target) -> None:
    request = synchronize(target, session_started_unix_ns=MAX_UINT64)
    assert target.call(1, "worker/Synchronize", request).code == "INVALID_ARGUMENT"


def a_clock_that_is_ahead(target: Target) -> None:
    """Only one rank is told."""
    request = synchronize(
        target, session_started_unix_ns=max(target.next_start(), time.time_ns() + HOUR_NS // 2)
    )
    assert target.call(1, "worker/Synchronize", request).code == "OK"


def a_checkpoint_of_one_rank(target: Target) -> None:
    directory = str(target.directory / "runs" / "lone")
    request = worker_pb2.SaveCheckpointRequest(call=header(target), directory=directory, format=SHARDED)
    assert target.call(1, "worker/SaveCheckpoint", request, timeout_s=1.0).code == "DEADLINE_EXCEEDED"


def nine_bytes_that_claim_gigabytes(target: Target) -> None:
    before = target.sizes()
    for claim in (
        common_pb2.Batch(row_numbers=[common_pb2.RowRange(stop=1 << 33)]),
        common_pb2.Batch(rows=1 << 40),
        common_pb2.Batch(rows=1, columns=[common_pb2.Column(name="x", jagged=True, lengths=[1 << 40])]),
    ):
        request = actor_pb2.ComputeLogProbRequest(call=header(target), batch=claim, temperature=1.0)
        answers = target.to_all("actor/ComputeLogProb", request)
        assert {each.code for each in answers} <= {"INVALID_ARGUMENT", "ABORTED"}
    for old, new in zip(before, target.sizes(), strict=True):
        assert new.rss - old.rss < GROWTH


def a_call_id_of_a_megabyte(target: Target) -> None:
    request = synchronize(target, call_id="i" * (1 << 20))
    assert target.call(0, "worker/Synchronize", request).code == "INVALID_ARGUMENT"
    message = worker_pb2.DispatchRequest(
        method=SERVICES["worker"]["Synchronize"].path, timeout_s=1.0, request=request.SerializeToString()
    )
    (response,) = target.call(0, "worker/Dispatch", message).responses
    assert len(response) < 10_000


def a_session_of_a_megabyte(target: Target) -> None:
    name = "s" * (1 << 20)
    for path, request in (
        ("worker/Synchronize", synchronize(target, session=name)),
        ("worker/EndSession", worker_pb2.EndSessionRequest(session=name)),
        ("worker/Dispatch", worker_pb2.DispatchRequest(session=name)),
    ):
        assert target.call(0, path, request).code == "INVALID_ARGUMENT"


def a_known_id_for_another_method(target: Target) -> None:
    call = header(target)
    assert target.call(0, "worker/Synchronize", worker_pb2.SynchronizeRequest(call=call)).code == "OK"
    assert target.call(0, "worker/Offload", worker_pb2.OffloadRequest(call=call)).code == "INVALID_ARGUMENT"
    other = common_pb2.Call(call_id=call.call_id, session="other", sequence=1)
    answer = target.call(0, "worker/Synchronize", worker_pb2.SynchronizeRequest(call=other))
    assert answer.code == "INVALID_ARGUMENT"


def a_call_that_is_cancelled_and_made_again(target: Target) -> None:
    request = batch(target, "generate_sequences").SerializeToString()
    path = SERVICES["actor"]["GenerateSequences"].path
    for _ in range(20):
        target.send(0, path, [request], cancel_after_s=0.01)
    assert target.send(0, path, [request]).code in {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED"}


def directories_anywhere(target: Target) -> None:
    runs = str(target.directory / "runs")
    for directory in (
        "/tmp/x",
        "../../etc",
        f"{runs}/../x",
        f"{runs}/{'d' * 300}",
        f"{runs}{'/d' * 4_000}",
        "\0",
    ):
        for path, request in (
            ("worker/Profile", worker_pb2.ProfileRequest(call=header(target), directory=directory, calls=1)),
            (
                "worker/LoadCheckpoint",
                worker_pb2.LoadCheckpointRequest(call=header(target), directory=directory),
            ),
            (
                "worker/SaveCheckpoint",
                worker_pb2.SaveCheckpointRequest(call=header(target), directory=directory, format=SHARDED),
            ),
        ):
            answers = target.to_all(path, request)
            assert {each.code for each in answers} == {"INVALID_ARGUMENT"}, (path, directory[:100], answers)


def four_billion_steps(target: Target) -> None:
    for given in ({"epochs": 2**32 - 1, "mini_batches": 1}, {"epochs": 1, "mini_batches": 2**32 - 1}):
        request = batch(target, "update_actor", schedule=actor_pb2.Schedule(**given))
        answers = target.to_all("actor/UpdateActor", request)
        assert {each.code for each in answers} == {"INVALID_ARGUMENT"}, answers


def times_that_are_no_numbers(target: Target) -> None:
    for seconds in (math.nan, math.inf, -1.0, 1e300):
        watch = worker_pb2.WatchRequest(interval_s=seconds)
        assert target.call(0, "worker/Watch", watch).code == "INVALID_ARGUMENT"


def temperatures_that_are_no_numbers(target: Target) -> None:
    for value in (math.nan, math.inf, -math.inf):
        sampling = actor_pb2.Sampling(temperature=value, max_new_tokens=4)
        answers = target.to_all(
            "actor/GenerateSequences", batch(target, "generate_sequences", sampling=sampling)
        )
        assert {each.code for each in answers} == {"INVALID_ARGUMENT"}, answers
        answers = target.to_all("actor/ComputeLogProb", batch(target, "compute_log_prob", temperature=value))
        assert {each.code for each in answers} == {"INVALID_ARGUMENT"}, answers


def bytes_that_are_no_request(target: Target) -> None:
    for rpc in rpcs(target.role):
        if rpc.path.startswith("/rlhf."):
            assert target.send(0, rpc.path, [b"\xff" * 9]).code == "INVALID_ARGUMENT", rpc


def connections_that_say_nothing(target: Target) -> None:
    before = target.sizes()
    with contextlib.ExitStack() as opened:
        for number, address in enumerate(target.addresses * 150):
            host, _, port = address.rpartition(":")
            each = opened.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 3 == 1:
                each.sendall(b"PRI * HTTP/2.0\r\n")
            if number % 3 == 2:
                each.sendall(random.Random(number).randbytes(100))
        target.check()
    after = target.settled(before)
    assert all(new.descriptors <= old.descriptors for old, new in zip(before, after, strict=True)), (
        before,
        after,
    )


def six_hundred_sessions(target: Target) -> None:
    sessions(target, 600)


def two_thousand_sessions(target: Target) -> None:
    sessions(target, 2000)


def sessions(target: Target, count: int) -> None:
    before, start = target.sizes(), target.next_start()
    for number in range(count):
        request = synchronize(target, session_started_unix_ns=start + 1000 * number)
        assert target.call(1, "worker/Synchronize", request).code == "OK"
    for old, new in zip(before, target.settled(before), strict=True):
        assert new.rss - old.rss < GROWTH


def a_prompt_of_32_mib(target: Target) -> None:
    prompt = "1+1=" * (8 << 20)
    column = common_pb2.Column(name="prompt", text=common_pb2.TextRows(rows=[prompt]))
    request = actor_pb2.GenerateSequencesRequest(
        call=header(target), batch=common_pb2.Batch(rows=1, columns=[column]), sampling=SAMPLING
    )
    answers = target.to_all("actor/GenerateSequences", request, timeout_s=20.0)
    assert {each.code for each in answers} <= {"INVALID_ARGUMENT", "ABORTED"}, answers


ABUSES = [
    a_start_at_the_end_of_time, a_clock_that_is_ahead, a_checkpoint_of_one_rank, nine_bytes_that_claim_gigabytes,
    a_call_id_of_a_megabyte, a_session_of_a_megabyte, a_known_id_for_another_method,
    a_call_that_is_cancelled_and_made_again, directories_anywhere, four_billion_steps, times_that_are_no_numbers,
    temperatures_that_are_no_numbers, bytes_that_are_no_request, connections_that_say_nothing, six_hundred_sessions,
    pytest.param(two_thousand_sessions, marks=pytest.mark.full),
    a_prompt_of_32_mib,
]  # fmt: skip


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.__name__)
def test_abuse_leaves_a_service_as_it_was(actor: Target, abuse: Callable[[Target], None]) -> None:
    abuse(actor)


def test_a_number_in_metadata_that_is_none_is_told_with_its_row(targets: dict[str, Target]) -> None:
    """Of the first row; the others have scores."""
    reward = targets["reward"]
    rows = [reward_pb2.TextRow(prompt="1+1="), reward_pb2.TextRow(prompt="1+1=")]
    rows[0].metadata.fields["x"].number_value = math.nan
    answer = reward.call(0, "reward/ComputeReward", reward_pb2.ComputeRewardRequest(text_rows=rows))
    assert answer.code == "OK"
    first, second = reward_pb2.ComputeRewardResponse.FromString(answer.responses[0]).scores
    assert (first.WhichOneof("verdict"), second.WhichOneof("verdict")) == ("error", "score")
    reward.check()
    assert reward.compute() == reward.numbers


STOPPED = """
import sys, time
import grpc
from rlhf.contract import CHANNEL_OPTIONS, SERVICES
channel = grpc.insecure_channel(sys.argv[1], CHANNEL_OPTIONS)
messages = [bytes.fromhex(each) for each in sys.argv[2:]]
def said():
    yield from messages
    time.sleep(600)
for _ in channel.stream_stream(SERVICES["worker"]["Dispatch"].path)(said()):
    print("there", flush=True)
"""


def test_a_controller_that_is_stopped_locks_the_next_out_for_no_longer_than_one_that_was_cut_off(
    actor: Target,
) -> None:
    request = synchronize(actor, session="stopped").SerializeToString()
    path = SERVICES["worker"]["Synchronize"].path
    messages = [
        worker_pb2.DispatchRequest(session="stopped"),
        worker_pb2.DispatchRequest(method=path, timeout_s=5.0, request=request),
    ]
    command = [sys.executable, "-c", STOPPED, actor.address, *(m.SerializeToString().hex() for m in messages)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "there\n"
        client.send_signal(signal.SIGSTOP)
        service = Service("actor", actor.address)
        with pytest.raises(Refused, match="session 'stopped' is open on this rank"):
            service.call("synchronize")
        service.close()
        actor.session().close()
    finally:
        client.kill()
        client.wait()
