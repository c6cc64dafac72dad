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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.conftest import wait_until
from chaos.sandbox_attacks import ATTACKS, FILES, Attack
from python_path import python_path

from services.reward.sandbox import cgroups
from services.reward.sandbox.grader import Grader, ProgramVerdict
from services.reward.sandbox.program import Submission, read_row
from settings.reward import SandboxTable

TABLE = SandboxTable(
    workers=8, wall_time_s=3.0, cpu_time_s=1, memory_mb=256, processes=16, output_kb=64, tmpfs_mb=8
)
VERDICT_TIMEOUT_S = 90.0
LIMITS = {"pids": 24, "memory": 1 << 28, "cpu": cgroups.CPU_PERIOD_US}
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
    """Possible leftovers of programs or of the grader."""

    mounts: str
    threads: int
    temporary: frozenset[str]


def look() -> Traces:
    return Traces(
        Path("/proc/self/mountinfo").read_text(),
        threading.active_count(),
        frozenset(name for name in os.listdir("/tmp") if MARK in name or "rlhf-unsandboxed" in name),
    )


def open_files() -> set[str]:
    """Number and file of each open descriptor; the file of a socket or a pipe is unique."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@dataclass
class Arena:
    """Where the attacks run: a host with a secret file, a secret in the environment, and sockets to reach.

    Attributes:
        before: Traces before the grader was made.
        open_before: Open descriptors at that time.
        others: Processes that other tests had started.
        listeners: Sockets that must get nothing.
    """

    grader: Grader
    secret_file: Path
    port: int
    before: Traces
    open_before: set[str]
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

    def row(self, attack: Attack) -> tuple[str, list[dict[str, Any]]]:
        """A program and its tests."""
        filled = [{key: self.fill(text) for key, text in test.items()} for test in attack.tests]
        return self.fill(attack.code), filled or TESTS

    def submit(self, attack: Attack) -> Future[ProgramVerdict]:
        code, tests = self.row(attack)
        return self.grader.submit(read_row("", code, "", {"tests": tests}, "fraction"))


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
        before, open_before = look(), open_files()
        others = frozenset(psutil.Process().children(recursive=True))
        grader = Grader(TABLE)
        yield Arena(grader, secret_file, port, before, open_before, others, listeners)
        grader.close()
    del os.environ[SECRET_NAME]


@pytest.fixture(scope="module")
def verdicts(arena: Arena) -> Mapping[str, Future[ProgramVerdict]]:
    """All attacks at once, through the pool."""
    return {name: arena.submit(attack) for name, attack in ATTACKS.items()}


WITHOUT_GROUPS = """
mount -t tmpfs none /sys/fs/cgroup
mount -t tmpfs none /mnt
number=0
for path in $VISIBLE; do number=$((number + 1)); mkdir /mnt/$number; mount --bind $path /mnt/$number; done
for path in $HIDDEN; do mount -t tmpfs -o mode=755 none $path; done
number=0
for path in $VISIBLE; do number=$((number + 1)); mkdir -p $path; mount --bind /mnt/$number $path; done
umount -l /mnt
exec "$@"
"""
"""Runs a program where there are no control groups, and where every user sees the paths $VISIBLE."""
ANOTHER = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
OWNER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""Another user than root; or root as one who is not, but owns all that root does."""


def graded_by(
    user: Sequence[str], arena: Arena, attacks: Mapping[str, Attack]
) -> Mapping[str, ProgramVerdict]:
    """Verdicts of a grader of another user, on a host without control groups."""
    paths = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, Path(__file__).parents[2])}
    hidden = {path: top for path in paths for top in path.parents if not top.stat().st_mode & 1}
    environment = {"VISIBLE": " ".join(map(str, hidden)), "HIDDEN": " ".join(map(str, set(hidden.values())))}
    given = {
        "table": TABLE.model_dump(),
        "rows": {name: arena.row(attack) for name, attack in attacks.items()},
    }
    said = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", WITHOUT_GROUPS, "sh", *user, sys.executable, "-m", "chaos.sandbox_grader"],
        input=json.dumps(given), stdout=subprocess.PIPE, check=True, text=True, timeout=VERDICT_TIMEOUT_S,
        env={**os.environ, **environment, "PYTHONPATH": python_path(Path(__file__).parents[1])},
    ).stdout  # fmt: skip
    return {
        name: ProgramVerdict(tuple(reasons), fault) for name, (reasons, fault) in json.loads(said).items()
    }


UNGROUPED = {name: attack for name, attack in ATTACKS.items() if not attack.needs_groups}


@pytest.fixture(scope="module")
def verdicts_of_plain_user(arena: Arena) -> Mapping[str, ProgramVerdict]:
    """Nearly all attacks once more, as a plain user without control groups."""
    return graded_by(ANOTHER, arena, UNGROUPED)


@pytest.fixture(scope="module")
def verdicts_of_owner(
    arena: Arena, verdicts: Mapping[str, Future[ProgramVerdict]]
) -> Mapping[str, ProgramVerdict]:
    """Attacks on files, as a plain user who owns the files that all sandboxes share."""
    futures.wait(verdicts.values(), VERDICT_TIMEOUT_S)
    return graded_by(OWNER, arena, FILES)


def check(verdict: ProgramVerdict, attack: Attack) -> None:
    assert verdict.fault == ""
    assert verdict.reason in attack.reasons
    assert attack.passes_some or "" not in verdict.reasons


def test_an_attack_that_works_would_be_seen(arena: Arena) -> None:
    verdict = arena.submit(Attack("def attack():\n    return 'escaped'", ())).result(VERDICT_TIMEOUT_S)
    assert verdict.reasons == ("", "raised")


def test_tests_that_lie_behind_a_descriptor_would_be_seen(arena: Arena) -> None:
    code = arena.fill(ATTACKS["reading the tests"].code) + "print(attack())"
    behind, end = os.pipe()
    os.write(end, json.dumps(TESTS[1]).encode())
    said = subprocess.check_output([sys.executable, "-c", code], pass_fds=[behind], text=True)
    os.close(behind)
    os.close(end)
    assert said == "escaped\n"


@pytest.mark.timeout(VERDICT_TIMEOUT_S + 10)
@pytest.mark.parametrize("name", ATTACKS)
def test_is_contained_and_graded_as_failed(name: str, verdicts: Mapping[str, Future[ProgramVerdict]]) -> None:
    check(verdicts[name].result(VERDICT_TIMEOUT_S), ATTACKS[name])


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(2 * VERDICT_TIMEOUT_S + 10)
@pytest.mark.parametrize("name", UNGROUPED)
def test_is_contained_as_a_plain_user_without_control_groups(
    name: str, verdicts_of_plain_user: Mapping[str, ProgramVerdict]
) -> None:
    check(verdicts_of_plain_user[name], ATTACKS[name])


@needs_root
@pytest.mark.timeout(2 * VERDICT_TIMEOUT_S + 10)
@pytest.mark.parametrize("name", FILES)
def test_the_owner_of_the_files_reaches_no_other_sandbox_by_them(
    name: str, verdicts_of_owner: Mapping[str, ProgramVerdict]
) -> None:
    check(verdicts_of_owner[name], FILES[name])


@pytest.mark.timeout(VERDICT_TIMEOUT_S + 10)
def test_nothing_is_left_over_and_the_grader_still_answers(
    arena: Arena, verdicts: Mapping[str, Future[ProgramVerdict]]
) -> None:
    for verdict in verdicts.values():
        verdict.result(VERDICT_TIMEOUT_S)
    arena.grader.close()
    assert set(psutil.Process().children(recursive=True)) <= arena.others
    assert marked_processes() == []
    assert select.select(arena.listeners, [], [], 0)[0] == []
    assert groups() == []
    assert look() == arena.before
    # Descriptors of earlier tests may be closed meanwhile.
    assert open_files() <= arena.open_before
    again = Grader(TABLE)
    right = read_row("", "def f(x):\n    return x + 1", "", {"tests": [
        {"kind": "call", "function": "f", "args": [1], "expected": 2}]}, "all")  # fmt: skip
    assert again.submit(right).result(VERDICT_TIMEOUT_S).reasons == ("",)
    again.close()


LONE_GRADER = """
import sys
from settings.reward import SandboxTable
from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import Submission, read_row

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


HONEST = """
import time
def f(number):
    while time.process_time() < 1.0: pass
    return number
"""
SPINNING = """
import os
def f(number):
    for _ in range(30):
        if os.fork() == 0:
            os.setsid()
            break
    while True: pass
"""


@pytest.mark.full
@pytest.mark.timeout(VERDICT_TIMEOUT_S)
@pytest.mark.skipif(
    not any(controller.name == "cpu" for controller in cgroups.usable(LIMITS)),
    reason="no control groups for CPU",
)
def test_honest_programs_beside_spinning_ones_take_at_most_three_times_as_long() -> None:
    grader = Grader(SandboxTable(workers=8, wall_time_s=40.0, processes=32))

    def row(code: str, number: int) -> Submission:
        test = {"kind": "call", "function": "f", "args": [number], "expected": number}
        return read_row("", code, "", {"tests": [test]}, "all")

    def time_honest(first: int) -> float:
        started = time.monotonic()
        honest = [grader.submit(row(HONEST, first + number)) for number in range(4)]
        assert all(future.result(VERDICT_TIMEOUT_S) == ProgramVerdict(("",)) for future in honest)
        return time.monotonic() - started

    alone = time_honest(0)
    spinning = [grader.submit(row(SPINNING, number)) for number in range(4)]
    beside = time_honest(4)
    print(f"4 honest programs: {alone:.2f} s alone, {beside:.2f} s beside 4 that spin with 31 processes each")
    assert beside <= 3 * alone
    assert [future.result(VERDICT_TIMEOUT_S) for future in spinning] == [ProgramVerdict(("died",))] * 4
    grader.close()


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
    return [path for controller in cgroups.usable(LIMITS) for path in controller.parent.glob(pattern)]
