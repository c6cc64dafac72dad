"""The code grader under attack: every program is contained, is graded as failed, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.conftest import wait_until
from chaos.sandbox_attacks import ATTACKS

from rlhf.config import SandboxTable
from services.reward.sandbox import cgroups
from services.reward.sandbox.grader import Grader, Verdict
from services.reward.sandbox.program import read_row

TABLE = SandboxTable(
    workers=4, wall_time_s=3.0, cpu_time_s=1, memory_mb=256, processes=16, output_kb=64, tmpfs_mb=8
)
VERDICT_TIMEOUT_S = 90.0
MARK = f"mark{secrets.token_hex(8)}"
SECRET = f"secret{secrets.token_hex(8)}"
SECRET_NAME = f"RLHF_{MARK}".upper()
TESTS = [
    {"kind": "call", "function": "attack", "expected": "escaped"},
    # No attack can answer this; an attack that forges a verdict would have to forge this one too.
    {"kind": "call", "function": "solve", "args": [7], "expected": SECRET},
]


@dataclass(frozen=True)
class Traces:
    """What could be left behind by programs, or by the grader."""

    mounts: str
    descriptors: int
    threads: int
    temporary: frozenset[str]


def look() -> Traces:
    return Traces(
        Path("/proc/self/mountinfo").read_text(),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        frozenset(name for name in os.listdir("/tmp") if MARK in name or "rlhf-unsandboxed" in name),
    )


@dataclass
class Arena:
    """Where the attacks run: a host with a secret file, a secret in the environment, and sockets to reach.

    Attributes:
        before: What there was before the grader, and the processes that other tests had started.
        listeners: Sockets that must hear nothing.
    """

    grader: Grader
    secret_file: Path
    port: int
    before: Traces
    others: frozenset[psutil.Process]
    listeners: tuple[socket.socket, ...]

    def fill(self, code: str) -> str:
        """A program with what its placeholders stand for."""
        for placeholder, text in {
            "MARK": MARK, "SECRET_FILE": str(self.secret_file), "SECRET_VALUE": SECRET, "SECRET_NAME": SECRET_NAME,
            "PORT": str(self.port), "OUR_SOURCE": __file__,
        }.items():  # fmt: skip
            code = code.replace(placeholder, text)
        return code

    def submit(self, code: str, tests: Sequence[dict[str, Any]] = ()) -> Future[Verdict]:
        return self.grader.submit(
            read_row("", self.fill(code), "", {"tests": list(tests) or TESTS}, "fraction")
        )


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    secret_file = tmp_path_factory.mktemp("secret") / "file"
    secret_file.write_text(SECRET)
    os.environ[SECRET_NAME] = SECRET
    with contextlib.ExitStack() as stack:
        tcp, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listeners = (tcp, abstract, udp)
        for listener in listeners:
            stack.enter_context(listener)
            listener.setblocking(False)
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        abstract.bind(f"\0{MARK}")
        tcp.listen()
        abstract.listen()
        before, others = look(), frozenset(psutil.Process().children(recursive=True))
        grader = Grader(TABLE)
        yield Arena(grader, secret_file, port, before, others, listeners)
        grader.close()
    del os.environ[SECRET_NAME]


@pytest.fixture(scope="module")
def verdicts(arena: Arena) -> Mapping[str, Future[Verdict]]:
    """All attacks at once, through the pool."""
    return {name: arena.submit(attack.code, attack.tests) for name, attack in ATTACKS.items()}


def test_an_attack_that_works_would_be_seen(arena: Arena) -> None:
    verdict = arena.submit("def attack():\n    return 'escaped'").result(VERDICT_TIMEOUT_S)
    assert verdict.reasons == ("", "raised")


def test_tests_that_lie_behind_a_descriptor_would_be_seen(arena: Arena) -> None:
    code = arena.fill(ATTACKS["reading the tests"].code) + "print(attack())"
    behind, end = os.pipe()
    os.write(end, json.dumps(TESTS[1]).encode())
    said = subprocess.check_output([sys.executable, "-c", code], pass_fds=[behind], text=True)
    os.close(behind)
    os.close(end)
    assert said == "escaped\n"


def test_there_are_at_least_45_attacks() -> None:
    assert len(ATTACKS) >= 45


@pytest.mark.timeout(VERDICT_TIMEOUT_S + 10)
@pytest.mark.parametrize("name", ATTACKS)
def test_is_contained_and_graded_as_failed(name: str, verdicts: Mapping[str, Future[Verdict]]) -> None:
    verdict = verdicts[name].result(VERDICT_TIMEOUT_S)
    assert verdict.fault == ""
    assert "" not in verdict.reasons
    assert verdict.reason in ATTACKS[name].reasons


@pytest.mark.timeout(VERDICT_TIMEOUT_S + 10)
def test_nothing_is_left_over_and_the_grader_still_answers(
    arena: Arena, verdicts: Mapping[str, Future[Verdict]]
) -> None:
    for verdict in verdicts.values():
        verdict.result(VERDICT_TIMEOUT_S)
    arena.grader.close()
    assert set(psutil.Process().children(recursive=True)) <= arena.others
    assert marked_processes() == []
    assert select.select(arena.listeners, [], [], 0)[0] == []
    assert groups() == []
    assert look() == arena.before
    again = Grader(TABLE)
    right = read_row("", "def f(x):\n    return x + 1", "", {"tests": [
        {"kind": "call", "function": "f", "args": [1], "expected": 2}]}, "all")  # fmt: skip
    assert again.submit(right).result(VERDICT_TIMEOUT_S).reasons == ("",)
    again.close()


LONE_GRADER = """
import sys
from rlhf.config import SandboxTable
from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import read_row

code = '''
import subprocess, sys
def attack():
    subprocess.run([sys.executable, "-sS", "-c", "import time; time.sleep(1000)", "%s"])
'''
tests = {"tests": [{"kind": "call", "function": "attack", "expected": 1}]}
Grader(SandboxTable(wall_time_s=1000)).submit(read_row("", code % sys.argv[1][::-1], "", tests, "all")).result()
"""


def test_programs_die_with_a_grader_that_is_killed() -> None:
    # Its own command line has the mark backwards, so that only the program's child has it.
    lone = subprocess.Popen([sys.executable, "-c", LONE_GRADER, MARK[::-1]])
    try:
        wait_until(lambda: bool(marked_processes()), VERDICT_TIMEOUT_S)
        sandboxes = psutil.Process(lone.pid).children(recursive=True)
        assert sandboxes
    finally:
        lone.send_signal(signal.SIGKILL)
        lone.wait()
    wait_until(lambda: not marked_processes(), VERDICT_TIMEOUT_S)
    wait_until(lambda: not any(is_alive(process) for process in sandboxes), VERDICT_TIMEOUT_S)
    Grader(TABLE).close()
    assert groups(lone.pid) == []


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def marked_processes() -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if MARK in process.cmdline():
                found.append(process.pid)
    return found


def groups(service: int | None = None) -> list[Path]:
    """Control groups of the sandboxes of a process, by default of this one."""
    pattern = f"{cgroups.PREFIX}{service or os.getpid()}-*"
    return [path for controller in cgroups.usable() for path in controller.parent.glob(pattern)]
