"""Tools of the integration tests: running services called rank by rank, processes, and their leftovers."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import tomli_w
from python_path import python_path

from controller.config.config import Config
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.wire_ranks import mesh_from_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from rlhf.channels import open_channel
from rlhf.contract import CHANNEL_OPTIONS, SERVICES, Method, group_methods
from rlhf.errors import RlhfError, from_rpc_error
from rlhf.v1 import actor_pb2, common_pb2, critic_pb2, worker_pb2

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 60.0
"""Deadline of what is expected to end well."""

HUGGING_FACE = worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE
SHARDED = worker_pb2.CHECKPOINT_FORMAT_SHARDED

POLICY_LOSS, VALUE_LOSS = actor_pb2.PolicyLoss(), critic_pb2.ValueLoss()
PREPARED_LOSS = actor_pb2.PolicyLoss(aggregation="seq-mean-token-mean")
"""A loss that adds up by rows, so that an update by it can be prepared."""
TWO_STEPS = actor_pb2.Schedule(epochs=1, mini_batches=2)


class Pending:
    """A call that every rank has been sent."""

    def __init__(self, service: str, method: Method, futures: Sequence[Any]) -> None:
        self._service = service
        self._method = method
        self.futures = futures

    def responses(self) -> list[Any]:
        """Response of each rank. Raises the error of the first that failed, once all have ended."""
        answers = self.outcomes()
        for answer in answers:
            if isinstance(answer, RlhfError):
                raise answer
        return answers

    def outcomes(self) -> list[Any]:
        """Answer of each rank: a response or an error."""
        return [self._outcome(rank, future) for rank, future in enumerate(self.futures)]

    def _outcome(self, rank: int, future: Any) -> Any:
        try:
            return future.result()
        except grpc.RpcError as error:
            return from_rpc_error(error, f"{self._service} rank {rank} {self._method.name}")


class Service:
    """A running service as a controller sees it, through plain blocking channels to each rank.

    It is a session of its own: its first call supersedes the session before.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.session = f"test-{uuid.uuid4().hex}"
        self.sequence = 0
        self._channels = [open_channel(address, CHANNEL_OPTIONS)]
        self.description = self.ask("Describe")
        self.addresses = [rank.endpoint.address for rank in self.description.ranks]
        self._channels += [open_channel(other, CHANNEL_OPTIONS) for other in self.addresses[1:]]
        youngest = max(self.ask("Describe", rank).session_started_unix_ns for rank in self.ranks)
        self._started_unix_ns = max(time.time_ns(), youngest + 1000)
        self.mesh = mesh_from_proto(self.description.mesh)
        self._methods = group_methods(self.description.role)
        self._fetcher = Fetcher(host_id(), create_readers())

    @property
    def ranks(self) -> range:
        return range(len(self._channels))

    def close(self) -> None:
        """Ends the session, as far as the ranks are there, and drops the connections."""
        for rank in self.ranks:
            with contextlib.suppress(RlhfError):
                self.ask("EndSession", rank, timeout_s=1.0, session=self.session)
        self._fetcher.close()
        for channel in self._channels:
            channel.close()

    def ask(self, name: str, rank: int = 0, timeout_s: float = TIMEOUT_S, **fields: Any) -> Any:
        """One of the calls that a rank answers at once: of WorkerService or TransferService."""
        method = {**SERVICES["worker"], **SERVICES["transfer"]}[name]
        callee = self.stub(method, rank)
        try:
            return callee(method.request(**fields), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"{self.name} rank {rank} {name}") from error

    def stub(self, method: Method, rank: int) -> Any:
        """The callable of a method on one rank."""
        channel: Any = self._channels[rank]
        kind = channel.unary_stream if method.streams else channel.unary_unary
        request: Any = method.request
        response: Any = method.response
        return kind(
            method.path,
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    def channel(self, rank: int = 0) -> grpc.Channel:
        return self._channels[rank]

    def header(self, **changes: Any) -> common_pb2.Call:
        """The header of the session's next call."""
        self.sequence += 1
        values = {
            "call_id": uuid.uuid4().hex,
            "session": self.session,
            "session_started_unix_ns": self._started_unix_ns,
            "sequence": self.sequence,
            "epoch": self.description.epoch,
            "seed": 1,
            "step": 1,
        }
        return common_pb2.Call(**{**values, **changes})

    def requests(
        self, name: str, batch: Batch | None = None, *, header: common_pb2.Call | None = None, **options: Any
    ) -> list[Any]:
        """The request of each rank, the rows dealt out as the method's transfer protocol says."""
        method = self._methods[name]
        header = header or self.header()
        if batch is None:
            return [method.request(call=header, **options) for _ in self.ranks]
        assert method.spec is not None
        dealt = get_protocol(method.spec.transfer_protocol).distribute(batch.rows, self.mesh)
        return [
            method.request(call=header, batch=wire.to_proto(batch.take(rows), rows), **options)
            for rows in dealt
        ]

    def send(self, name: str, requests: Mapping[int, Any], timeout_s: float = TIMEOUT_S) -> Pending:
        """Sends ranks their requests."""
        method = self._methods[name]
        futures = [
            self.stub(method, rank).future(request, timeout=timeout_s) for rank, request in requests.items()
        ]
        return Pending(self.name, method, futures)

    def start(
        self, name: str, batch: Batch | None = None, *, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Pending:
        """Calls a method on all ranks, by its Python name."""
        return self.send(name, dict(enumerate(self.requests(name, batch, **options))), timeout_s)

    def call(self, name: str, batch: Batch | None = None, **options: Any) -> list[Any]:
        """Calls a method on all ranks and waits; raises what the first rank that failed said."""
        return self.start(name, batch, **options).responses()

    def rows(self, name: str, batch: Batch, **options: Any) -> Batch:
        """Calls a method and returns the rows it made, by reference."""
        return self.made(self.call(name, batch, **options))

    @staticmethod
    def made(responses: Sequence[Any]) -> Batch:
        """The rows that the ranks made, as one batch."""
        parts = [wire.from_proto(response.batch) for response in responses]
        return Batch.concat([part for part in parts if part.columns])

    def introduce(self, *others: Service) -> None:
        """Lets calls of this session name the ranks of other services."""
        if not self.sequence:
            self.call("synchronize")
        endpoints = [rank.endpoint for other in others for rank in other.description.ranks]
        for rank in self.ranks:
            self.ask("Introduce", rank, session=self.session, endpoints=endpoints)

    def values(self, batch: Batch, name: str) -> Any:
        """A copy of a column's values."""
        values = self._fetcher.fetch(batch.select([name]), time.monotonic() + TIMEOUT_S).values[name]
        if isinstance(values, Jagged):
            return Jagged(values.values.copy(), values.lengths)
        return values.copy() if isinstance(values, np.ndarray) else values

    def column(self, name: str, batch: Batch, output: str, **options: Any) -> Any:
        """Calls a method and returns the values of one of its columns."""
        return self.values(self.rows(name, batch, **options), output)

    @property
    def versions(self) -> list[int]:
        """The policy version of each rank."""
        return [self.ask("Describe", rank).policy_version for rank in self.ranks]

    def used_bytes(self) -> list[int]:
        """Bytes in use in the arena of each rank."""
        return [self.ask("Stat", rank).used_bytes for rank in self.ranks]

    def export(self, directory: Path) -> str:
        """Writes the weights as a Hugging Face directory; returns their sha256."""
        return self.call("save_checkpoint", directory=str(directory), format=HUGGING_FACE)[0].sha256

    def save(self, directory: Path) -> None:
        self.call("save_checkpoint", directory=str(directory), format=SHARDED)

    def load(self, directory: Path) -> None:
        self.call("load_checkpoint", directory=str(directory))

    def watch_until(self, condition: Callable[[Any], bool], rank: int = 0) -> Any:
        """The first status of a rank that meets the condition."""
        statuses = self.stub(SERVICES["worker"]["Watch"], rank)(
            worker_pb2.WatchRequest(interval_s=0.05), timeout=TIMEOUT_S
        )
        try:
            return next(status for status in statuses if condition(status))
        finally:
            statuses.cancel()

    def cancel(self, call_id: str, ranks: Iterable[int] | None = None) -> list[bool]:
        """Whether each rank knew the call."""
        return [self.ask("Cancel", rank, call_id=call_id).found for rank in ranks or self.ranks]


def jagged(rows: Sequence[Any], dtype: Any) -> Jagged[np.ndarray]:
    """Rows of numbers, lists or arrays, as one column."""
    values = np.asarray([value for row in rows for value in row], dtype)
    return Jagged(values, np.asarray([len(row) for row in rows], np.int64))


def take_rows(column: Jagged[np.ndarray]) -> list[np.ndarray]:
    """A jagged column, row by row."""
    return [column.row(row) for row in range(column.rows)]


@dataclass(frozen=True)
class Cluster:
    """Services that are up, and the config they were started with.

    Attributes:
        initial: By service, a sharded checkpoint of the state it started in.
        processes: What was started, and all that it started.
    """

    config: Config
    initial: Mapping[str, Path]
    processes: Processes

    @contextlib.contextmanager
    def service(self, name: str) -> Iterator[Service]:
        """A new session with a service, which is in the state it started in."""
        service = Service(name, self.config.services[name].address)
        try:
            if name in self.initial:
                # A run that an earlier test has killed may hold the service for some seconds more.
                header = service.header(take_over=True)
                service.call("load_checkpoint", directory=str(self.initial[name]), header=header)
            yield service
        finally:
            service.close()

    def select(self, **services: str) -> Config:
        """The config of a run on some of the services: name in the run = name here."""
        chosen = {name: self.config.services[own] for name, own in services.items()}
        return self.config.model_copy(update={"services": chosen})


def write_config(config: Config, path: Path) -> Path:
    """The config as a TOML file of what was given: an algorithm refuses keys that it has no use for."""
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=True)))
    return path


_given_ports: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Free ports of loopback, outside the ephemeral range, different for each pytest worker and at each call: a service
    binds its port seconds later."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = range(10_000 + worker, max(first_ephemeral, 20_000), workers)
    candidates = random.SystemRandom().sample(sorted(set(mine) - _given_ports), 50 * count)
    ports = list(itertools.islice(filter(_is_free, candidates), count))
    _given_ports.update(ports)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Polls the condition until it holds, and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (held := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
    return held


def wait_for_line(process: subprocess.Popen[str], line: str, timeout_s: float = TIMEOUT_S) -> None:
    """Waits until the process says this line as the first on its stdout."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(timeout_s), f"nothing said within {timeout_s:g} s"
    said = process.stdout.readline()
    assert said == line, (said, process.communicate(timeout=timeout_s))


class Processes:
    """Starts commands, and knows all that lives of them, children of children included: they inherit a mark."""

    MARK = "RLHF_TEST"

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A command of this environment, with its output in pipes unless told otherwise."""
        return subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options},
            env={**os.environ, "PYTHONPATH": python_path(HERE, HERE.parent), self.MARK: self.id},
        )

    def serve(
        self,
        config: Path,
        log_dir: Path,
        *settings: str,
        timeout_s: float = 110.0,
        program: str = "forked_services.py",
        cwd: Path = ROOT,
    ) -> subprocess.Popen[str]:
        """Starts the services of a config by `forked_services`, or another program here with its arguments, with
        overrides "key.path=value", and waits until all are healthy. SIGTERM ends them; the exit code is 0 then."""
        launcher = self.start("python", str(HERE / program), str(config), str(log_dir), *settings, cwd=cwd)
        wait_for_line(launcher, "ready\n", timeout_s)
        return launcher

    def living(self) -> list[psutil.Process]:
        """Started processes that still live."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def kill(self) -> None:
        for process in self.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get(self.MARK) == self.id and process.status() != psutil.STATUS_ZOMBIE
        return False


def leaked_shared_memory() -> set[str]:
    """Names of the files in shared memory that no process has mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}\n" not in mapped}


def left_in_shared_memory(before: set[str], within_s: float = 10.0) -> set[str]:
    """Names of the leaked files that were not there before, once there are none, or after `within_s` seconds:
    processes of other tests, which run at the same time, may be between making a semaphore and mapping it."""
    deadline = time.monotonic() + within_s
    while (left := leaked_shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def abstract_sockets() -> set[str]:
    """Names of the abstract unix sockets of this host that arenas are handed out on."""
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return {name[1:] for name in names if name.startswith("@rlhf-")}


def is_listening(address: str) -> bool:
    """Whether somebody accepts connections there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def under_one_name(lines: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Metrics in which the mean of held-out rewards is "evaluation/reward", also where a service says that its scores
    lie between 0 and 1, so that a run calls it accuracy."""
    names = {"evaluation/accuracy": "evaluation/reward"}
    return [{names.get(name, name): value for name, value in line.items()} for line in lines]
