"""Services in processes of their own that tests send what no caller means, and look at afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import psutil
import tomli_w
from chaos import failing_workers, shots
from chaos.fuzzing import Answer
from chaos.valid_requests import valid_requests

from integration.harness import SHARDED, Service, free_ports, is_listening, wait_until
from integration.ranks import server_context
from rlhf.contract import CHANNEL_OPTIONS, SERVICES
from rlhf.errors import Refused
from rlhf.v1 import worker_pb2

WORDS = ("1+1=", "2", "3+5=8", "7+", "12")
"""Texts that the quickstart's tokenizer knows."""
ARENA_MB = 16
START_TIMEOUT_S = 60.0
FREE_WITHIN_S = 25.0
"""Longest until a run can have the service again."""
MOST_MEMORY = 8 << 30
"""Address space of a rank: one that takes more fails, and not the machine."""
RESULTS = {
    "actor": (("generate_sequences", "compute_log_prob"), "update_actor"),
    "critic": (("compute_values",), "update_critic"),
    "reference": (("compute_ref_log_prob",), None),
    "reward": (("compare_pairs",), "update_reward"),
    "rollout": ((), None),
    "values": ((), None),
}
"""Methods of a role with a model that return rows, and the one that changes its weights. Services of
roles rollout and values have no weights before they receive them."""


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
        self, name: str, role: str, num_ranks: int, table: Mapping[str, Any], directory: Path, context: Any
    ) -> None:
        self.role, self.name, self.directory = role, name, directory
        self.numbers: dict[str, Any] = {}
        self.valid = valid_requests(role, WORDS)
        address, store = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.table = {"role": role, "address": address, "ranks": num_ranks, "arena_mb": ARENA_MB,
                      "stuck_timeout_s": 20.0, "output_roots": [str(directory / "runs")], **table}  # fmt: skip
        config = directory / f"{name}.toml"
        config.write_text(tomli_w.dumps({"services": {role: self.table}}))
        self.log, port = directory / f"{name}.log", int(store.rpartition(":")[2])
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
        except grpc.RpcError as error:
            return Answer.failed(error, got)
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
        begin_session(service)
        return service

    @property
    def service(self) -> shots.Service:
        """The service as `shots` needs it."""
        epoch, root = self.description.epoch, self.directory / "runs"
        return shots.Service(self.name, self.role, tuple(self.addresses), epoch, root, self.valid)

    def compute(self) -> dict[str, Any]:
        """Results of a run, bit for bit."""
        service = self.session()
        try:
            if "function" in self.table:
                (answer,) = service.call("compute_reward", **self.valid["compute_reward"][1])
                return {"scores": [str(score) for score in answer.scores]}
            found: dict[str, Any] = {}
            methods, update = RESULTS[self.role]
            for method in methods:
                batch, options = self.valid[method]
                made = service.rows(method, batch, **options)  # pyright: ignore[reportArgumentType]
                for column in made.columns:
                    values = service.values(made, column)
                    found[f"{method} {column}"] = getattr(values, "values", values).tolist()
            if update:
                batch, options = self.valid[update]
                service.call(update, batch, **options)
                found["versions"] = service.versions
                found["sha256"] = service.export(self.directory / "runs" / f"{self.name}-state")
            return found
        finally:
            service.close()

    def save_in_background(self) -> None:
        """Writes a checkpoint in the background, so that every rank has the thread that it keeps for that."""
        service, directory = self.session(), str(self.directory / "runs" / f"{self.name}-checkpoint")
        try:
            service.call("save_checkpoint", directory=directory, format=SHARDED, in_background=True)
            for rank in service.ranks:
                service.ask("AwaitCheckpoint", rank, directory=directory)
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


def begin_session(service: Service, **changes: Any) -> None:
    """Begins the session of a client from the model's directory. Waits, where the service is shared, for the end of a
    session that has loaded a checkpoint or offloaded the model: it has the service for itself until then.

    Args:
        service: The client.
        changes: Fields of the call's header, by name.
    """

    def has_begun() -> bool:
        (first, *others) = service.start("begin_session", header=service.header(**changes)).outcomes()
        if isinstance(first, Refused) and "has loaded a checkpoint here" in str(first):
            return False
        for outcome in (first, *others):
            if isinstance(outcome, Exception):
                raise outcome
        return True

    wait_until(has_begun, FREE_WITHIN_S, "a service that nobody else has changed")


@contextlib.contextmanager
def started(
    services: Mapping[str, tuple[str, int, Mapping[str, Any]]], directory: Path
) -> Iterator[dict[str, Target]]:
    """Starts services beside each other, and computes on each for the first time; ends them with the block.

    Args:
        services: By name: role, number of ranks and further keys of the table.
        directory: For configs, logs and what the services write.
    """
    context = server_context()
    made: dict[str, Target] = {}
    try:
        for name, (role, num_ranks, table) in services.items():
            made[name] = Target(name, role, num_ranks, table, directory, context)
        for target in made.values():
            target.wait()
            target.numbers = target.compute()
            if "optimizer" in target.table:
                target.save_in_background()
        yield made
    finally:
        for target in made.values():
            target.end()
