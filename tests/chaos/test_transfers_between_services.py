"""A service whose rank dies or stops at any moment of a transfer to another service: the other one says who, in time,
goes on, and leaks nothing; and once the dead one has been started again, the next transfer succeeds.

Both sides are services under torchrun. Two of them read at the same time from the one that fails: one by memfd, one
by tcp, each on two ranks.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from chaos.transfer_service import made

from integration.harness import Processes, Service, free_ports, is_listening, jagged, wait_until
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.testing.held import Held
from rlhf.errors import DeadlineExceeded, PeerFailed, RlhfError, ServiceLost

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DEADLINE_S = 4.0
"""Of a call that transfers. What is left of it when the fetch gives up, 0.8 s, is for the answer, which says who has
ended: on busy cores 0.4 s were too short for it."""
LONGEST_CALL_S = 0.1
"""A strike comes within so long after a call has begun: by tcp a call takes about as long."""
COUNT = 2 << 20
STARTS = (0, 7)
"""Two rows of 16 MiB; each rank of a reader gets one."""
SUM = float(sum(made(start, COUNT).sum() for start in STARTS))
TRANSPORTS = ("memfd", "tcp")
MAKERS = ("maker_a", "maker_b")
"""The same service at two addresses, so that one starts while the other is at work. Each address is used again and
again: what a reader remembers of a dead rank must not be taken for what is there now."""
START_TIMEOUT_S = 60.0
SETTLED = 3
"""Turns after which a reader has started all the threads that it will."""


@dataclass(frozen=True)
class Maker:
    """A service with rows that others read, until it is ended."""

    service: Service
    rows: Batch
    launcher: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Of the rank, not of its torchrun."""
        return self.service.description.ranks[0].pid

    def strike(self, number: signal.Signals) -> float:
        """Ends or stops the rank; returns when."""
        struck = time.monotonic()
        os.kill(self.pid, number)
        return struck

    def close(self) -> None:
        self.service.close()
        self.launcher.wait(START_TIMEOUT_S)


@dataclass(frozen=True)
class Report:
    """How a reader told of the maker's end: what each rank said, and when it had been said."""

    outcomes: list[object]
    at: float

    def names(self, maker: Maker) -> bool:
        """Whether some rank says who is gone. One that had its row already only says that its peer failed."""
        told = [
            each for each in self.outcomes if isinstance(each, RlhfError) and not isinstance(each, PeerFailed)
        ]
        who = f"rank 0 at {maker.service.addresses[0]}"
        return bool(told) and all(
            isinstance(e, ServiceLost | DeadlineExceeded) and who in str(e) for e in told
        )


class Reader:
    """A service that reads what makers made, by one transport."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.service = Service(name, address)
        self.good_calls = 0
        self.begins = threading.Event()

    @property
    def maps(self) -> bool:
        """Whether it reads the memory of a maker and needs nothing of its process."""
        return self.name == "memfd"

    def held(self) -> list[Held]:
        """Resources held, by rank."""
        return [Held.by(rank.pid) for rank in self.service.description.ranks]

    def read(self, rows: Batch) -> Report | None:
        """One call; what the ranks said, where not all read what was made."""
        self.begins.set()
        outcomes = self.service.start(
            "compute_ref_log_prob", rows, timeout_s=DEADLINE_S, temperature=1.0
        ).outcomes()
        if any(isinstance(outcome, RlhfError) for outcome in outcomes):
            return Report(outcomes, time.monotonic())
        assert sum(outcome.outcome.metrics["sum"].sum for outcome in outcomes) == SUM
        for outcome in outcomes:
            assert set(outcome.outcome.timing.traffic) == {self.name}
        self.good_calls += 1
        return None

    def wait_for_calls(self, count: int) -> None:
        """Returns once so many more calls have gone well."""
        wanted = self.good_calls + count
        wait_until(lambda: self.good_calls >= wanted, 15 * DEADLINE_S, f"{count} transfers by {self.name}")

    def read_until_it_fails(self, rows: Batch) -> Report:
        for _ in range(10_000):
            if report := self.read(rows):
                return report
        raise AssertionError("10,000 transfers from a service that was killed went well")


@dataclass
class Stage:
    """The services, and how they are started."""

    directory: Path
    processes: Processes
    addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (*MAKERS, *TRANSPORTS)
        self.addresses = {
            n: f"127.0.0.1:{port}" for n, port in zip(names, free_ports(len(names)), strict=True)
        }
        (self.directory / "config.json").write_text("{}")
        services = {
            name: {"role": "reference", "model": str(self.directory), "address": address, "arena_mb": 40,
                   **({"ranks": 2, "transports": [name]} if name in TRANSPORTS else {})}
            for name, address in self.addresses.items()
        }  # fmt: skip
        (self.directory / "services.toml").write_text(tomli_w.dumps({"services": services}))

    def launch(self, role: str, name: str, ranks: int) -> subprocess.Popen[str]:
        with (self.directory / f"{name}.log").open("a") as log:
            launcher = self.processes.start(
                "torchrun", "--rdzv-backend=rlhf", f"--nproc-per-node={ranks}", str(HERE / "transfer_service.py"), role,
                "--config", str(self.directory / "services.toml"), "--name", name, stdout=log, stderr=log,
            )  # fmt: skip
        address = self.addresses[name]
        wait_until(lambda: is_listening(address) or launcher.poll() is not None, START_TIMEOUT_S, name)
        assert launcher.poll() is None, (self.directory / f"{name}.log").read_text()
        return launcher

    def maker(self, name: str) -> Maker:
        launcher = self.launch("Maker", name, 1)
        service = Service(name, self.addresses[name])
        wishes = Batch(
            len(STARTS),
            {
                "prompt_ids": LocalColumn(jagged([[start] for start in STARTS], np.int64)),
                "response_ids": LocalColumn(jagged([[COUNT] for _ in STARTS], np.int64)),
            },
        )
        rows = service.rows("compute_ref_log_prob", wishes, temperature=1.0).columns["ref_log_probs"]
        return Maker(service, Batch(len(STARTS), {"prompt_ids": rows, "response_ids": rows}), launcher)

    def readers(self) -> list[Reader]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.launch("Reader", name, 2), TRANSPORTS))
        return [Reader(name, self.addresses[name]) for name in TRANSPORTS]


@contextmanager
def stage(directory: Path) -> Iterator[Stage]:
    processes = Processes()
    try:
        yield Stage(directory, processes)
    finally:
        processes.kill()


def play(
    number: signal.Signals, maker: Maker, readers: Sequence[Reader], pool: ThreadPoolExecutor, wait_s: float
) -> dict[str, float]:
    """Strikes a maker while it is read from, so long after calls have begun; how long after the strike each reader
    reported it."""
    for reader in readers:
        reader.begins.clear()
    reports = {reader: pool.submit(reader.read_until_it_fails, maker.rows) for reader in readers}
    for reader in readers:
        assert reader.begins.wait(5)
    time.sleep(wait_s)
    struck = maker.strike(number)
    late = {}
    for reader, report in sorted(reports.items(), key=lambda item: item[0].maps):
        if reader.maps and number == signal.SIGSTOP:
            # Memory stays good while its owner is stopped: only the owner's end is an error.
            reader.wait_for_calls(2)
            struck = maker.strike(signal.SIGKILL)
        said = report.result(DEADLINE_S + 10)
        assert said.names(maker), f"{reader.name}: {said.outcomes}"
        late[reader.name] = said.at - struck
        assert late[reader.name] < DEADLINE_S + 1, f"{reader.name}: {said.outcomes}"
    return late


def held_by(readers: Sequence[Reader]) -> list[Held]:
    return [each for reader in readers for each in reader.held()]


def no_more_than(before: Sequence[Held], readers: Sequence[Reader]) -> list[Held]:
    """Resources held by readers where no rank holds more than before, else []."""
    now = held_by(readers)
    return now if all(last <= then for then, last in zip(before, now, strict=True)) else []


def endure(times: int, directory: Path) -> None:
    """So many kills and as many stops, in turns."""
    moment = random.Random(times)
    late: dict[str, list[float]] = {}
    settled, last = list[Held](), list[Held]()
    with stage(directory) as services, ThreadPoolExecutor(1) as starter, ThreadPoolExecutor(2) as pool:
        starting: Future[Maker] = starter.submit(services.maker, MAKERS[0])
        readers = services.readers()
        epochs = [reader.service.description.epoch for reader in readers]
        for turn in range(2 * times):
            number = (signal.SIGKILL, signal.SIGSTOP)[turn % 2]
            maker = starting.result()
            if turn + 1 < 2 * times:
                starting = starter.submit(services.maker, MAKERS[(turn + 1) % 2])
            # The transfer after a restart succeeds.
            for reader in readers:
                reader.service.introduce(maker.service)
                assert reader.read(maker.rows) is None, f"turn {turn}, {reader.name}"
            if turn == SETTLED:
                settled = held_by(readers)
            elif turn == 2 * times - 1:
                # What was mapped of makers that have ended goes once their end is noticed.
                last = wait_until(partial(no_more_than, settled, readers), DEADLINE_S, "what is held shrinks")
            for name, seconds in play(
                number, maker, readers, pool, moment.uniform(0, LONGEST_CALL_S)
            ).items():
                late.setdefault(f"{number.name} {name}", []).append(seconds)
            maker.close()
        assert [reader.service.ask("Describe").epoch for reader in readers] == epochs
        assert [reader.service.used_bytes() for reader in readers] == [[0, 0], [0, 0]]
    for case, seconds in sorted(late.items()):
        print(
            f"{case}: {len(seconds)} turns, reported after {statistics.median(seconds):.3f} s at the median and "
            f"{max(seconds):.3f} s at most; the deadline is {DEADLINE_S:g} s",
            file=sys.stderr,
        )
    print(f"held after {SETTLED} turns and at the end: {settled}, {last}", file=sys.stderr)


@pytest.mark.timeout(240)
def test_services_survive_the_end_of_a_service_they_read_from(tmp_path: Path) -> None:
    endure(3, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_services_survive_a_hundred_kills_and_a_hundred_stops(tmp_path: Path) -> None:
    endure(100, tmp_path)
