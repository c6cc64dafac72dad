"""The load tester measures what is true, against real servers in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Cluster, Processes, Service, free_ports
from loadtest.analysis import mean_wait_s
from loadtest.schedule import poisson

pytestmark = pytest.mark.slow

TIMEOUT_S = 90.0

Start = Callable[..., str]


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    try:
        yield processes
    finally:
        processes.kill()


@pytest.fixture
def servers(processes: Processes) -> dict[str, subprocess.Popen[str]]:
    """The servers that were started, by address."""
    return {}


@pytest.fixture
def start(processes: Processes, servers: dict[str, subprocess.Popen[str]]) -> Start:
    """Starts a server with a manner; returns its address."""

    def start(*manner: str) -> str:
        server = processes.start(Path(sys.executable).name, "-m", "loadtest_server", *manner)
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        servers[address] = server
        return address

    return start


@pytest.fixture
def loadtest(processes: Processes, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs the command to its end; returns its result and what it printed. `code` is the exit code it has to have."""

    def loadtest(
        address: str, *options: str, role: str = "reward", method: str = "ComputeReward", code: int = 0
    ) -> tuple[dict[str, Any], str]:
        path = tmp_path / "result.json"
        path.unlink(missing_ok=True)
        command = [
            "rlhf-loadtest",
            role,
            "--target",
            address,
            "--method",
            method,
            "--json",
            str(path),
            *options,
        ]
        ended = processes.start(*command)
        out, err = ended.communicate(timeout=TIMEOUT_S)
        assert ended.returncode == code, out + err
        return (json.loads(path.read_text()) if path.exists() else {}), out + err

    return loadtest


def test_an_open_loop_sees_a_stall_that_a_closed_loop_hides(start: Start, loadtest: Any) -> None:
    address = start("stalling")
    options = ("--duration", "3", "--warmup", "0.5")
    opened, _ = loadtest(address, "--rate", "100", "--arrivals", "constant", *options)
    closed, _ = loadtest(address, "--concurrency", "1", *options)
    # A fifth of the calls are due in a stall: the 99th percentile is 190 ms.
    assert opened["steps"][0]["latency_s"]["p99"] > 0.17
    assert closed["steps"][0]["latency_s"]["max"] > 0.17
    assert closed["steps"][0]["latency_s"]["p99"] < 0.1


def waits_of_one_server(service_s: float, rate: float, window: tuple[float, float], seed: int) -> list[float]:
    """Lindley's recursion: how long each arrival of the seed that is due in the window waits for a server that takes
    `service_s` a call."""
    waits, free_at = [], 0.0
    for arrival in itertools.takewhile(lambda arrival: arrival < window[1], poisson(rate, seed)):
        begins = max(arrival, free_at)
        free_at = begins + service_s
        if arrival >= window[0]:
            waits.append(begins - arrival)
    return waits


QUEUE_SEED = 97
"""Of arrivals whose waits, by Lindley's recursion, are within 2 % of those that theory says of very many."""


@pytest.mark.full
def test_waiting_is_that_of_these_very_arrivals_and_agrees_with_queueing_theory(
    start: Start, loadtest: Any
) -> None:
    service_s, load, duration_s = 0.04, 0.5, 16
    rate = load / service_s
    waits = waits_of_one_server(service_s, rate, (1.0, 1.0 + duration_s), QUEUE_SEED)
    exact_s, expected_s = sum(waits) / len(waits), mean_wait_s(rate, service_s)
    assert exact_s == pytest.approx(expected_s, rel=0.02)
    options = ("--rate", str(rate), "--duration", str(duration_s), "--seed", str(QUEUE_SEED))
    result, _ = loadtest(start("queueing", str(service_s)), *options)
    step = result["steps"][0]
    assert step["sent"] == len(waits)
    # The way to the server and back, and what a busy machine adds to it, is no waiting.
    waited_s = step["latency_s"]["mean"] - step["rest_s"]["mean"] - step["server_s"]["compute"]["mean"]
    assert waited_s == pytest.approx(exact_s, rel=0.05)
    assert waited_s == pytest.approx(expected_s, rel=0.1)
    assert step["server_s"]["queue"]["mean"] == pytest.approx(exact_s, rel=0.1)
    assert step["expected_queue_s"] == pytest.approx(mean_wait_s(step["sent_per_s"], service_s), rel=0.01)


def test_a_server_that_never_answers_ends_the_test_in_time_and_nothing_is_left(
    start: Start, servers: dict[str, subprocess.Popen[str]], loadtest: Any, processes: Processes
) -> None:
    address = start("silent")
    began = time.monotonic()
    options = ("--rate", "50", "--duration", "1", "--warmup", "0.5", "--drain", "0.5", "--slo", "errors=0")
    result, said = loadtest(address, *options, code=3)
    assert time.monotonic() - began < 15
    step = result["steps"][0]
    assert step["answered"] == 0
    assert step["errors"]["UNFINISHED"] >= step["sent"] > 0
    # Calls without an answer count with the time they had waited.
    assert step["latency_s"]["max"] > 1.0
    assert "errors=0: MISSED" in said
    assert [process.pid for process in processes.living()] == [servers[address].pid]
    servers[address].terminate()
    assert servers[address].communicate(timeout=TIMEOUT_S)[0] == "running: 0\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_measured(
    start: Start, processes: Processes, tmp_path: Path, number: signal.Signals
) -> None:
    address, path = start("prompt"), tmp_path / "result.json"
    ramp = ("--ramp", "40:50:2", "--duration", "1.5", "--warmup", "0")
    command = ("reward", "--target", address, "--method", "ComputeReward", *ramp, "--json", str(path))
    running = processes.start("rlhf-loadtest", *command)
    assert running.stderr is not None
    assert "40/s offered" in running.stderr.readline()
    running.send_signal(number)
    out, _ = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 128 + number
    assert "interrupted" in out
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert [step["level"] for step in result["steps"]] == [40, 50]
    assert result["steps"][0]["answered"] > 20
    assert result["steps"][1]["window_s"] < 1.5


def test_errors_are_told_by_code_with_their_cause(start: Start, loadtest: Any) -> None:
    result, said = loadtest(start("refusing"), "--rate", "50", "--duration", "0.5", "--warmup", "0")
    step = result["steps"][0]
    assert step["errors"] == {"RESOURCE_EXHAUSTED": step["sent"]}
    assert "no room today" in said
    # How fast a service refuses is not its latency.
    assert step["latency_s"] == {}


def test_a_service_whose_latency_is_beyond_the_warm_up_keeps_up(start: Start, loadtest: Any) -> None:
    options = ("--rate", "10", "--arrivals", "constant", "--duration", "2", "--warmup", "0.3")
    result, said = loadtest(start("slow", "1.0"), *options)
    step = result["steps"][0]
    assert (step["sent"], step["errors"], step["sustained"]) == (20, {}, True)
    assert step["answered"] < 15
    assert "increase --warmup" in said


def test_a_closed_loop_of_nothing_but_errors_is_not_sustained(start: Start, loadtest: Any) -> None:
    options = ("--concurrency", "2", "--duration", "0.5", "--warmup", "0")
    result, _ = loadtest(start("refusing"), *options)
    assert result["steps"][0]["sent"] > 0
    assert not result["steps"][0]["sustained"]


def test_an_objective_is_missed_where_no_call_was_made(start: Start, loadtest: Any) -> None:
    result, said = loadtest(
        start("prompt"), "--rate", "0.01", "--duration", "0.5", "--slo", "errors=0", code=3
    )
    assert result["steps"][0]["sent"] == 0
    assert "errors=0: MISSED" in said


def test_a_row_without_a_score_is_an_error(start: Start, loadtest: Any) -> None:
    options = ("--rate", "50", "--duration", "0.5", "--warmup", "0", "--rows", "3", "--slo", "errors=0")
    result, said = loadtest(start("half"), *options, code=3)
    assert result["steps"][0]["errors"] == {"ROW_ERROR": result["steps"][0]["sent"]}
    assert "cannot be read" in said


def test_objectives_that_are_met_are_no_failure(start: Start, loadtest: Any) -> None:
    options = ("--rate", "20", "--duration", "1", "--warmup", "0", "--slo", "p99=30s,errors=0,throughput=1")
    result, _ = loadtest(start("prompt"), *options)
    assert [verdict["met"] for verdict in result["steps"][0]["objectives"]] == [True, True, True]


@pytest.mark.full
def test_a_ramp_ends_at_what_the_server_cannot_do(start: Start, loadtest: Any) -> None:
    options = ("--ramp", "40:640:5", "--duration", "1", "--warmup", "0.5", "--arrivals", "constant")
    result, _ = loadtest(start("queueing"), *options)
    # 10 ms a call is 100 a second: 80 is kept up with, 160 and 320 are not, and 640 is not tried.
    sustained = [(step["level"], step["sustained"]) for step in result["steps"]]
    assert sustained == [(40, True), (80, True), (160, False), (320, False)]
    assert result["capacity"]["level"] == 80
    assert result["knee"]["level"] == 80


def test_nobody_there_is_one_line(loadtest: Any) -> None:
    result, said = loadtest(f"127.0.0.1:{free_ports(1)[0]}", code=1)
    assert result == {}
    assert said.startswith("error: ")
    assert said.count("\n") == 1


CALLS = [
    ("actor", "actor", "GenerateSequences"),
    ("actor", "actor", "ComputeLogProb"),
    pytest.param("lone_actor", "actor", "ComputeLoss", marks=pytest.mark.full),
    ("critic", "critic", "ComputeValues"),
    ("reference", "reference", "ComputeRefLogProb"),
    ("reward", "reward", "ComputeReward"),
    ("tensor_scorer", "reward", "ComputeReward"),
    pytest.param("actor", "actor", "Synchronize", marks=pytest.mark.full),
    ("critic", "critic", "Describe"),
    pytest.param("critic", "critic", "Check", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("service", "role", "method"), CALLS)
def test_every_role_can_be_tested_and_keeps_no_rows(
    cluster: Cluster, loadtest: Any, service: str, role: str, method: str
) -> None:
    address = cluster.config.services[service].address
    options = (
        "--concurrency",
        "3",
        "--rows",
        "4",
        "--duration",
        "2",
        "--warmup",
        "0.2",
        "--prompt-length",
        "4-8",
    )
    result, said = loadtest(address, *options, "--response-length", "4", role=role, method=method)
    step = result["steps"][0]
    assert step["errors"] == {}, said
    assert step["answered"] > 0
    # Describe and Check say nothing of their time; every call of a group does.
    assert bool(step["server_s"]) == (method not in ("Describe", "Check"))
    tested = Service(service, address)
    with contextlib.closing(tested):
        assert [tested.ask("Stat", rank).used_bytes for rank in tested.ranks] == [0] * len(tested.ranks)
