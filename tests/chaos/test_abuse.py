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
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import psutil
import pytest
import tomli_w
from chaos import failing_workers
from chaos.nasty import MAX_UINT64, Nasty
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import ActorGroup
from integration.harness import (
    POLICY_LOSS,
    SHARDED,
    TWO_STEPS,
    Service,
    free_ports,
    is_listening,
    jagged,
    wait_until,
)
from integration.test_sessions import connected
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from rlhf.contract import CHANNEL_OPTIONS, SERVICES, group_methods
from rlhf.errors import STATUS_KEY, Refused
from rlhf.v1 import actor_pb2, common_pb2, reward_pb2, worker_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CALLS = 1_200
RANKS = 2
ARENA_MB = 16
START_TIMEOUT_S = 60.0
FREE_WITHIN_S = 25.0
"""Longest until a run can have the service again."""
GROWTH = 64 << 20
"""Most that resident memory of a rank may grow in all the abuse after the first round of it [bytes]."""
MOST_MEMORY = 8 << 30
"""Address space of a rank: one that takes more fails, and not the machine."""
HOUR_NS = 3600 * 10**9

ALLOWED = {
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DATA_LOSS",
}  # fmt: skip
"""DATA_LOSS is an update that was not finite, and changed nothing."""

SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=6)
GENERATOR = np.random.default_rng(3)
LENGTHS = [3, 1, 5, 2, 4, 2, 6, 1]
TEXTS = Batch.of(
    prompt=[f"{i}+{i + 1}=" for i in range(8)],
    response=[str(2 * i + 1) for i in range(8)],
    text=[f"{i}+{i}={2 * i}" for i in range(8)],
)
IDS = {
    "prompt_ids": jagged([GENERATOR.integers(48, 58, 3) for _ in LENGTHS], np.int64),
    "response_ids": jagged([GENERATOR.integers(48, 58, n) for n in LENGTHS], np.int64),
}
ROWS = Batch.of(
    **IDS,
    log_probs=jagged([GENERATOR.normal(-1, 0.1, n) for n in LENGTHS], np.float32),
    advantages=jagged([GENERATOR.normal(-1, 0.1, n) for n in LENGTHS], np.float32),
)
SEQUENCES = ROWS.select(["prompt_ids", "response_ids"])
VALID: dict[str, tuple[Batch | None, dict[str, Any]]] = {
    "generate_sequences": (TEXTS.select(["prompt"]), {"sampling": SAMPLING}),
    "compute_log_prob": (SEQUENCES, {"temperature": 1.0}),
    "compute_loss": (TEXTS.select(["text"]), {}),
    "tokenize": (TEXTS.select(["prompt", "response"]), {}),
    "update_actor": (ROWS, {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}),
    "update_supervised": (SEQUENCES, {"schedule": TWO_STEPS}),
    "offload": (None, {}),
    "onload": (None, {}),
    "synchronize": (None, {}),
    "begin_session": (None, {}),
    "save_checkpoint": (None, {"directory": "checkpoint", "format": SHARDED}),
    "load_checkpoint": (None, {"directory": "../../../etc"}),
    "profile": (None, {"directory": "traces", "calls": 1}),
}


@dataclass(frozen=True)
class Rpc:
    """A method that ranks serve, ours or gRPC's."""

    path: str
    request: type[Any]


def rpcs(role: str) -> list[Rpc]:
    """All that a rank of a role serves, from the descriptors."""
    own = [Rpc(m.path, m.request) for name in (role, "worker", "transfer") for m in SERVICES[name].values()]
    foreign = [
        Rpc(f"/{service.full_name}/{method.name}", message_factory.GetMessageClass(method.input_type))
        for module in (health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    return own + foreign


@dataclass(frozen=True)
class Answer:
    """How a call ended: gRPC's code, and in which words."""

    code: str
    said: str = ""
    responses: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Size:
    """Usage of a rank: resident bytes, threads, descriptors."""

    rss: int
    threads: int
    descriptors: int


class Target:
    """A service in processes of its own, and plain channels to its ranks.

    Attributes:
        numbers: What a run computes on it, for the first time.
    """

    def __init__(
        self, role: str, num_ranks: int, table: dict[str, Any], directory: Path, context: Any
    ) -> None:
        self.role, self.directory = role, directory
        self.numbers: dict[str, Any] = {}
        address, store = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.table = {"role": role, "address": address, "ranks": num_ranks, "arena_mb": ARENA_MB,
                      "stuck_timeout_s": 20.0, "output_roots": [str(directory / "runs")], **table}  # fmt: skip
        config = directory / f"{role}.toml"
        config.write_text(tomli_w.dumps({"services": {role: self.table}}))
        self.log, port = directory / f"{role}.log", int(store.rpartition(":")[2])
        self.ranks: list[BaseProcess] = [
            context.Process(
                target=failing_workers.serve,
                args=(role, rank, num_ranks, port, directory, config, self.log),
                kwargs={"can_fail": False},
            )
            for rank in range(num_ranks)
        ]
        for rank in self.ranks:
            rank.start()
            psutil.Process(rank.pid).rlimit(psutil.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        self.address = address

    def wait(self) -> None:
        """Until it serves."""
        wait_until(lambda: is_listening(self.address) or not self.lives, START_TIMEOUT_S, "the service")
        assert self.lives, self.log.read_text()
        service = Service(self.role, self.address)
        self.description, self.addresses = service.description, service.addresses
        service.close()
        self.channels = [grpc.insecure_channel(each, CHANNEL_OPTIONS) for each in self.addresses]
        self.processes = [psutil.Process(rank.pid) for rank in self.ranks]

    @property
    def lives(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def send(
        self,
        rank: int,
        path: str,
        requests: Sequence[bytes],
        *,
        timeout_s: float = 5.0,
        cancel_after_s: float | None = None,
        channel: grpc.Channel | None = None,
    ) -> Answer:
        """Sends a rank messages, as a stream: a unary method takes the first. Reads no more than ten responses."""
        callee: Any = (channel or self.channels[rank]).stream_stream(path)
        call = callee(iter(requests), timeout=timeout_s)
        timer = threading.Timer(cancel_after_s, call.cancel) if cancel_after_s is not None else None
        if timer is not None:
            timer.start()
        got: list[bytes] = []
        try:
            for response in call:
                got.append(response)
                if len(got) == 10:
                    call.cancel()
        except grpc.RpcError:
            said = any(key == STATUS_KEY for key, _ in call.trailing_metadata() or ())
            code = call.code().name
            # A rank that was named as the source of rows, and is not there: said by one that is.
            code = "NOT_FOUND" if code == "UNAVAILABLE" and said else code
            return Answer(code, call.details() or "", tuple(got))
        finally:
            if timer is not None:
                timer.cancel()
        return Answer("OK", responses=tuple(got))

    def call(self, rank: int, method: str, request: Any, timeout_s: float = 5.0) -> Answer:
        """A method of the contract, by "service/Method"."""
        service, _, name = method.partition("/")
        return self.send(
            rank, SERVICES[service][name].path, [request.SerializeToString()], timeout_s=timeout_s
        )

    def to_all(self, method: str, request: Any, timeout_s: float = 5.0) -> list[Answer]:
        """As `call`, to every rank at the same time."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(
                pool.map(lambda rank: self.call(rank, method, request, timeout_s), range(len(self.ranks)))
            )

    def next_start(self) -> int:
        """A start of a session that every rank takes for younger than those it knows [Unix ns]."""
        told = (
            self.call(rank, "worker/Describe", worker_pb2.DescribeRequest(brief=True))
            for rank in range(len(self.ranks))
        )
        known = (worker_pb2.DescribeResponse.FromString(each.responses[0]) for each in told)
        return max(time.time_ns(), *(each.session_started_unix_ns + 1000 for each in known))

    def sizes(self) -> list[Size]:
        return [
            Size(process.memory_info().rss, process.num_threads(), process.num_fds())
            for process in self.processes
        ]

    def settled(self, before: Sequence[Size]) -> list[Size]:
        """Sizes, once connections that were closed have gone."""

        def has_settled() -> bool:
            pairs = zip(self.sizes(), before, strict=True)
            return all(
                now.threads <= old.threads and now.descriptors <= old.descriptors for now, old in pairs
            )

        with contextlib.suppress(AssertionError):
            wait_until(has_settled, FREE_WITHIN_S, "threads and descriptors as before")
        return self.sizes()

    def check(self) -> None:
        """All ranks are those that were started, and tell of the same epoch."""
        assert self.lives, f"a rank has ended:\n{self.log.read_text()[-5000:]}"
        for rank, info in enumerate(self.description.ranks):
            told = worker_pb2.DescribeResponse.FromString(
                self.call(rank, "worker/Describe", worker_pb2.DescribeRequest()).responses[0]
            )
            assert told.epoch == self.description.epoch
            assert [each.pid for each in told.ranks] == [each.pid for each in self.description.ranks]
            assert info.pid == self.ranks[rank].pid

    def session(self) -> Service:
        """A session of its own, which begins from the model's directory."""
        describe = worker_pb2.DescribeRequest(brief=True)

        def is_free() -> bool:
            told = self.to_all("worker/Describe", describe)
            return not any(worker_pb2.DescribeResponse.FromString(each.responses[0]).session for each in told)

        wait_until(is_free, FREE_WITHIN_S, "a service that nobody has")
        service = Service(self.role, self.address)
        service.call("begin_session")
        return service

    def compute(self) -> dict[str, Any]:
        """Results of a run, bit for bit."""
        service = self.session()
        try:
            if self.role == "reward":
                rows = [reward_pb2.TextRow(prompt="1+1=", response="2", ground_truth=t) for t in ("", "nan")]
                (answer,) = service.call("compute_reward", text_rows=rows)
                return {"scores": [str(score) for score in answer.scores]}
            found: dict[str, Any] = {}
            for method in ("generate_sequences", "compute_log_prob"):
                batch, options = VALID[method]
                made = service.rows(method, batch, **options)  # pyright: ignore[reportArgumentType]
                for column in made.columns:
                    values = service.values(made, column)
                    found[f"{method} {column}"] = getattr(values, "values", values).tolist()
            batch, options = VALID["update_actor"]
            service.call("update_actor", batch, **options)
            found["versions"] = service.versions
            found["sha256"] = service.export(self.directory / "runs" / "state")
            return found
        finally:
            service.close()

    def end(self) -> None:
        for channel in getattr(self, "channels", []):
            channel.close()
        for rank in self.ranks:
            if rank.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid or 0, signal.SIGTERM)
        deadline = time.monotonic() + 15
        for rank in self.ranks:
            rank.join(max(deadline - time.monotonic(), 0.1))
            if rank.is_alive():
                rank.kill()
                rank.join()


@pytest.fixture(scope="module")
def targets(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    directory = tmp_path_factory.mktemp("abuse")
    multiprocessing.set_forkserver_preload(["chaos.preloaded"])
    context: Any = multiprocessing.get_context("forkserver")
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    made: dict[str, Target] = {}
    tables: dict[str, tuple[int, dict[str, Any]]] = {
        "actor": (RANKS, {"model": str(model), "engine": "fsdp", "micro_batch_tokens": 64,
                          "optimizer": {"learning_rate": 1e-3}}),
        "reward": (1, {"function": "chaos.chaos_plugins:score"}),
    }  # fmt: skip
    try:
        for role, (num_ranks, table) in tables.items():
            made[role] = Target(role, num_ranks, table, directory, context)
        for target in made.values():
            target.wait()
            target.numbers = target.compute()
        yield made
    finally:
        for target in made.values():
            target.end()


@pytest.fixture(params=["actor", "reward"])
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
    drawn = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**32)))
    print(f"CHAOS_SEED={drawn}", flush=True)
    return drawn


def nasty(chance: random.Random, target: Target, *, is_guest: bool) -> Nasty:
    """Draws requests to a service. A guest leaves the session alone that is there: who says that it takes over, or
    names a session to end, does so."""
    now, epoch = time.time_ns(), target.description.epoch
    roots = target.directory / "runs"
    fields: dict[str, Callable[[random.Random], Any]] = {
        "call_id": lambda c: c.choice(("", "again", "again and again", uuid.uuid4().hex, "i" * (1 << 20))),
        "session": lambda c: c.choice(("", "stranger", "other", f"s{c.random()}", "s" * 100_000)),
        "sequence": lambda c: c.choice((0, 1, 1, 1, 2, 3, 7, MAX_UINT64)),
        "epoch": lambda c: c.choice((0, epoch, epoch, epoch, epoch - 1, MAX_UINT64)),
        "session_started_unix_ns": lambda c: c.choice(
            (0, 1, now, time.time_ns(), time.time_ns() + HOUR_NS // 2, time.time_ns() + HOUR_NS - 10**9, MAX_UINT64)
        ),
        "directory": lambda c: c.choice((
            "", "/", "../../etc", str(roots), f"{roots}/../../x", f"{roots}/made", "\0", f"{roots}/{'d' * 5_000}",
            f"{roots}/{'d/' * 3_000}", "/proc/self/mem/x", "~/x",
        )),
        "timeout_s": lambda c: c.choice((0.05, 0.3, 0.0, -1.0, float("nan"), float("inf"), 1e300)),
        "interval_s": lambda c: c.choice((0.0, 0.05, -1.0, float("nan"), float("inf"), 1e300)),
        "take_over": lambda c: not is_guest and c.random() < 0.5,
        "method": lambda c: c.choice((*(rpc.path for rpc in rpcs(target.role)), "", "/no/Method", "x" * 9_000)),
        "address": lambda c: c.choice(("", "127.0.0.1:1", "127.0.0.1:99999999", "a:b:c", "unix:/tmp/no")),
    }  # fmt: skip
    return Nasty(chance, fields)


def dispatched(chance: random.Random, drawn: Nasty, target: Target) -> bytes:
    """A message of Dispatch with a call in it, or with something else."""
    message = drawn.message(worker_pb2.DispatchRequest)
    if chance.random() < 0.7:
        method = chance.choice([m for name in (target.role, "worker") for m in SERVICES[name].values()])
        inner = drawn.message(method.request).SerializeToString()
        message.method, message.request = method.path, inner if chance.random() < 0.8 else drawn.noise(inner)
    return message.SerializeToString()


def attack(target: Target, rpc: Rpc, drawn: Nasty) -> Answer:
    """One random call, to one rank; of those that a rank could take for good, the answer is looked at."""
    chance = drawn.chance
    if rpc.path.endswith("/Dispatch"):
        requests = [dispatched(chance, drawn, target) for _ in range(chance.randint(1, 5))]
    else:
        requests = [
            drawn.message(rpc.request).SerializeToString() for _ in range(chance.choice((1, 1, 1, 0, 3)))
        ]
    if chance.random() < 0.15:
        requests = [drawn.noise(request) for request in requests]
    return target.send(
        chance.randrange(len(target.ranks)),
        rpc.path,
        requests,
        timeout_s=chance.choice((0.001, 0.05, 0.3, 1.0, 3.0)),
        cancel_after_s=chance.choice((None, None, None, None, 0.0, 0.02, 0.2)),
    )


def attacks(target: Target, count: int, seed: int, *, is_guest: bool = False) -> Counter[str]:
    """Random calls, many at a time; how many ended with which code."""
    all_rpcs, codes = rpcs(target.role), Counter[str]()

    def one(number: int) -> tuple[Rpc, int, Answer]:
        drawn = nasty(random.Random(f"{seed}/{number}"), target, is_guest=is_guest)
        rpc = all_rpcs[number % len(all_rpcs)]
        return rpc, number, attack(target, rpc, drawn)

    with ThreadPoolExecutor(16) as pool:
        for rpc, number, answer in pool.map(one, range(count)):
            if "google.protobuf" in answer.said and not rpc.path.startswith("/rlhf."):
                continue  # gRPC's own services say UNKNOWN to bytes that are no request
            assert answer.code in ALLOWED, (
                f"seed {seed}, call {number}: {rpc.path} ended {answer.code}: {answer.said}"
            )
            codes[answer.code] += 1
    return codes


def spoilt_calls(target: Target, count: int, seed: int) -> Counter[str]:
    """Calls that are right but for a thing or two, each the first of a session, to all ranks or to one of them; how
    many ended with which code."""
    codes, chance = Counter[str](), random.Random(seed)
    drawn = nasty(chance, target, is_guest=False)
    with ThreadPoolExecutor(RANKS) as pool:
        for number in range(count):
            service = Service(target.role, target.address)
            name = chance.choice(list(VALID))
            batch, options = VALID[name]
            if "directory" in options:
                options = {**options, "directory": str(target.directory / "runs" / options["directory"])}
            requests = [
                drawn.spoilt(request) for request in service.requests(name, batch, **options)[:1]
            ] * RANKS
            ranks = chance.choice(([0, 1], [0, 1], [0, 1], [0, 1], [0], [1]))
            timeout_s = 1.0 if len(ranks) == RANKS else 0.1
            path = SERVICES["worker" if name in WORKERS else target.role][_camel(name)].path
            sent = [(rank, requests[rank].SerializeToString()) for rank in ranks]
            send = partial(target.send, timeout_s=timeout_s)
            for answer in [
                f.result() for f in [pool.submit(send, rank, path, [body]) for rank, body in sent]
            ]:
                assert answer.code in ALLOWED, (
                    f"seed {seed}, call {number}: {name} ended {answer.code}: {answer.said}\n{str(requests[0])[:3000]}"
                )
                codes[answer.code] += 1
            service.close()
    return codes


WORKERS = {method.snake_name for method in SERVICES["worker"].values()}


def _camel(name: str) -> str:
    return "".join(map(str.capitalize, name.split("_")))


def test_random_calls_leave_a_service_as_it_was(target: Target) -> None:
    drawn = seed()
    attacks(target, CALLS // 4, drawn)
    before = target.settled(target.sizes())
    codes = attacks(target, CALLS, drawn + 1)
    after = target.settled(before)
    print(f"{target.role}: {dict(codes)}; {before} -> {after}", flush=True)
    target.check()
    for old, new in zip(before, after, strict=True):
        assert new.rss - old.rss < GROWTH
        assert new.threads <= old.threads
        assert new.descriptors <= old.descriptors


def test_calls_with_something_wrong_in_them_leave_a_service_as_it_was(actor: Target) -> None:
    """The same calls for the third time: ranks keep freed memory for the next call (`keep_freed_memory`), so that the
    largest of them may raise their resident memory once, which depends on what else is under way."""
    drawn = seed()
    for _ in range(2):
        spoilt_calls(actor, 200, drawn)
    before = actor.settled(actor.sizes())
    codes = spoilt_calls(actor, 200, drawn)
    after = actor.settled(before)
    print(f"{dict(codes)}; {before} -> {after}", flush=True)
    for old, new in zip(before, after, strict=True):
        assert new.rss - old.rss < GROWTH
        assert new.threads <= old.threads
        assert new.descriptors <= old.descriptors


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

    def log_probs(run: Cluster) -> list[float]:
        group = run.group("actor")
        assert isinstance(group, ActorGroup)
        rows = group.compute_log_prob(FutureBatch.of(**IDS), 1.0).result(["log_probs"], 60.0)
        return reader.values(rows, "log_probs").values.tolist()

    with connected(config, Session(seed=3)) as run:
        expected = log_probs(run)
        codes = attacks(actor, 400, seed(), is_guest=True)
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
    rows, given = VALID[method]
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


def two_thousand_sessions(target: Target) -> None:
    before, start = target.sizes(), target.next_start()
    for number in range(2_000):
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
    temperatures_that_are_no_numbers, bytes_that_are_no_request, connections_that_say_nothing, two_thousand_sessions,
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
        with pytest.raises(Refused, match="session 'stopped' is running here"):
            service.call("synchronize")
        service.close()
        actor.session().close()
    finally:
        client.kill()
        client.wait()
