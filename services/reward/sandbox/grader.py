"""Grades programs, each in two new sandboxes, on a pool of threads that wait for them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rlhf.errors import ConfigError
from services.reward.sandbox import test_runner, wire
from services.reward.sandbox.bubblewrap import Bubblewrap
from services.reward.sandbox.isolation import Isolation, Process, SandboxFailed, Unsandboxed
from services.reward.sandbox.program import Submission
from services.reward.sandbox.remote_program import START_TIMEOUT_S
from services.reward.sandbox.test_kinds import MAX_CAUSE
from settings.reward import SandboxTable

GRACE_S = 1.0
"""Seconds beyond the time limit of a program in which the test runner may send its verdict."""
MAX_VERDICT_BYTES = 1 << 20
ENFORCE_EVERY_S = 0.05
STAGES = test_runner.READY + test_runner.VALID + test_runner.BEGUN
REASONS = ("wrong", "raised", "timeout", "died", "output_limit", "malformed", "tests_ended")
"""Reasons why a program does not pass a test: its answer differs from the expected one ("wrong"), it raised an
exception, its time was up, its process ended, an answer was too large or no plain data, or its answers made the test
runner end."""
TRANSIENT = frozenset({"timeout", "tests_ended"})
"""Reasons that may be due to the load of the host, so that another attempt may pass."""

ATTEMPTS = {
    "write to the root": "os.mkdir('/probe')",
    "open internet sockets": "socket.socket(socket.AF_INET)",
    "become root": "os.setuid(0)",
    "make namespaces": "ctypes.CDLL(None).unshare(0x10000000)",
    "see /proc": "os.listdir('/proc')",
    "see files of the host": "os.stat('/etc/passwd')",
    "see processes of the host": "-1 if os.getpid() < 10 else os.getpid()",
}
"""Actions that a program must not be able to do, by name: expressions that raise OSError or are -1 in a working
sandbox."""
ATTEMPT = """
import ctypes, os, socket
attempts = {%s}
def fails(name):
    try:
        return attempts[name]() == -1
    except OSError:
        return True
"""


@dataclass(frozen=True)
class ProgramVerdict:
    """Result of grading a program.

    Attributes:
        reasons: For each test, "" if the program passed it, else one of `REASONS`. Empty if there is a fault.
        fault: Why the program could not be graded, for a cause other than the program; "" if it was graded.
    """

    reasons: tuple[str, ...] = ()
    fault: str = ""

    @property
    def reason(self) -> str:
        """Reason of the first test that the program did not pass; "" if it passed all."""
        return next((reason for reason in self.reasons if reason), "")

    def score(self, kind: str) -> float:
        """Returns the score: for kind "all", 1 if all tests were passed, else 0; for kind "fraction", the share of
        tests that were passed. Not defined if there is a fault."""
        passed = self.reasons.count("")
        return passed / len(self.reasons) if kind == "fraction" else float(passed == len(self.reasons))


class _Pipe(contextlib.AbstractContextManager["_Pipe"]):
    """Context manager of a pipe; closes both ends on exit. Either end may be closed earlier.

    Attributes:
        reader, writer: Unbuffered files of the two ends.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader, self.writer = open(reader, "rb", 0), open(writer, "wb", 0)  # noqa: SIM115 - see __exit__

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.writer.close()


def grade(program: Submission, isolation: Isolation, table: SandboxTable) -> ProgramVerdict:
    """Runs one program against its tests in two new sandboxes; blocks until both have ended. Whatever the program does,
    each stage takes little more than the table's `wall_time_s`, and no process or file is left behind. If a sandbox
    fails, the verdict has a fault.

    Args:
        program: The program and its tests.
        isolation: Starts the two sandboxes.
        table: The table `sandbox` of the config, with the limits.
    """
    shared = {"output_bytes": table.output_kb * 1024}
    errors: list[str] = []
    try:
        with _Pipe() as verdicts, contextlib.ExitStack() as running:
            with _Pipe() as requests, _Pipe() as answers, verdicts.writer:
                theirs, ours = requests.reader.fileno(), (requests.writer.fileno(), answers.reader.fileno())
                job = {**shared, "code": program.code, "requests": theirs}
                candidate = isolation.start("candidate", job, answers.writer.fileno(), [theirs])
                running.callback(lambda: errors.append(candidate.end()))
                job = {
                    **shared, "tests": [wire.encode(test) for test in program.tests], "prelude": program.prelude,
                    "wall_time_s": table.wall_time_s, "requests": ours[0], "answers": ours[1],
                }  # fmt: skip
                process = isolation.start("test_runner", job, verdicts.writer.fileno(), ours)
                running.callback(lambda: errors.append(process.end()))
            stages, verdict = _listen(verdicts.reader.fileno(), table.wall_time_s, (candidate, process))
    except SandboxFailed as error:
        return ProgramVerdict(fault=" ".join(filter(None, (str(error), *errors))))
    return _verdict(stages, verdict, len(program.tests), " ".join(filter(None, errors)))


def _listen(fd: int, wall_time_s: float, processes: Sequence[Process]) -> tuple[bytes, bytes]:
    """Waits for the verdict of the test runner, and meanwhile enforces the limits of the sandboxes once they are up.

    Args:
        fd: Descriptor from which stages and verdict are read.
        wall_time_s: Time limit in seconds, which begins anew with each stage.
        processes: The two sandboxes.

    Returns:
        The stages that the test runner has reached, and its encoded verdict, empty if it ended or exceeded its time
        without one.

    Raises:
        SandboxFailed: The limits cannot be enforced.
    """
    heard = stages = b""
    deadline = time.monotonic() + START_TIMEOUT_S + GRACE_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        for process in processes if stages else ():
            process.enforce()
        if not poll.poll(min(left, ENFORCE_EVERY_S) * 1000):
            continue
        part = os.read(fd, 1 << 16)
        heard += part
        header = heard.lstrip(STAGES)
        if heard[: -len(header) or None] != stages:
            stages = heard[: -len(header) or None]
            deadline = time.monotonic() + wall_time_s + GRACE_S
        size = int.from_bytes(header[: wire.HEADER_BYTES], "big")
        if not part or len(stages) > len(STAGES) or size > MAX_VERDICT_BYTES:
            break
        if size and len(header) >= wire.HEADER_BYTES + size:
            return stages, header[wire.HEADER_BYTES :]
    return stages, b""


def _verdict(stages: bytes, said: bytes, num_tests: int, errors: str) -> ProgramVerdict:
    """Returns the verdict that the test runner sent or, without a valid one, that follows from the stages. A failure
    before the first call of the program is a fault; any later failure counts as the program's, so no program can
    cause a fault.

    Args:
        stages: Stages that the test runner has reached.
        said: Encoded verdict of the test runner; may be empty or invalid.
        num_tests: Number of tests.
        errors: Error output of the sandboxes, for faults.
    """
    try:
        verdict = wire.decode(said)
        if (
            isinstance(verdict, dict)
            and test_runner.BEGUN not in stages
            and isinstance(verdict.get("fault"), str)
        ):
            # Tests are code of a data set, which may send any text in place of the test runner.
            return ProgramVerdict(fault=f"{verdict['fault'][:MAX_CAUSE]} {errors}".strip())
        reasons = verdict["reasons"]
        if len(reasons) == num_tests and all(reason in ("", *REASONS) for reason in reasons):
            return ProgramVerdict(tuple(reasons))
    except (wire.Malformed, TypeError, KeyError):
        pass
    if test_runner.BEGUN in stages:
        return ProgramVerdict(("tests_ended",) * num_tests)
    if stages:
        return ProgramVerdict(fault="the tests end, or run out of time, before they call the program")
    return ProgramVerdict(fault=f"the tests did not start: {errors or 'time was up'}")


def choose(table: SandboxTable) -> Isolation:
    """Returns bubblewrap if it works on this host and passes `verify`; else `Unsandboxed` if the config allows it.

    Raises:
        ConfigError: Sandboxes do not work on this host, and the config does not allow to do without; the message
            gives the cause.
    """
    try:
        isolation = Bubblewrap(table)
        verify(isolation, table)
    except ConfigError as error:
        if not table.allow_unsandboxed:
            raise ConfigError(f"sandbox: {error}") from error
        logging.critical("UNSANDBOXED: programs run with all rights of this service, because: %s", error)
        return Unsandboxed(table)
    logging.info("sandbox: %s", isolation.describe())
    return isolation


def verify(isolation: Isolation, table: SandboxTable) -> None:
    """Checks an isolation by a program that tries every action of `ATTEMPTS`.

    Raises:
        ConfigError: The program does not run, or one of its forbidden actions succeeds.
    """
    attempts = ", ".join(f"{name!r}: lambda: {code}" for name, code in ATTEMPTS.items())
    fails = {"kind": "call", "function": "fails", "kwargs": {}, "tolerance": 0.0, "accepted": [True]}
    tests = [{**fails, "args": [name]} for name in ATTEMPTS]
    verdict = grade(Submission(ATTEMPT % attempts, "", tests, "all"), isolation, table)
    if verdict.fault:
        raise ConfigError(verdict.fault)
    breaches = [name for name, reason in zip(ATTEMPTS, verdict.reasons, strict=True) if reason]
    if breaches:
        raise ConfigError(f"in it, programs can {', '.join(breaches)}, or do not run ({verdict.reason})")


class Grader:
    """Thread pool that grades programs. It caches verdicts, except faults and those with a reason in `TRANSIENT`.
    Thread-safe.

    Args:
        table: The table `sandbox` of the config.

    Raises:
        ConfigError: As raised by `choose`.
    """

    def __init__(self, table: SandboxTable) -> None:
        self._table = table
        self._isolation = choose(table)
        # A sandbox dies with the thread that started it, so threads live as long as the pool.
        self._pool = ThreadPoolExecutor(table.workers or os.cpu_count(), "sandbox")
        self._known: OrderedDict[str, Future[ProgramVerdict]] = OrderedDict()
        self._limits = table.model_dump_json(exclude={"workers", "cache_entries", "score"})
        self._lock = threading.Lock()

    def submit(self, program: Submission) -> Future[ProgramVerdict]:
        """Schedules the grading of a program; returns the future of its verdict. An equal program with equal tests gets
        the same future while it is cached, unless its verdict is a fault or has a reason in `TRANSIENT`."""
        key = program.key(self._limits)
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or _may_differ(known):
                known = self._pool.submit(grade, program, self._isolation, self._table)
            self._known[key] = known
            while len(self._known) > self._table.cache_entries:
                self._known.popitem(last=False)
        return known

    def close(self) -> None:
        """Waits for the programs that are running, and cancels the others."""
        self._pool.shutdown(cancel_futures=True)


def _may_differ(future: Future[ProgramVerdict]) -> bool:
    """Returns whether grading the program again could give a different verdict; False while it is being graded."""
    if not future.done():
        return False
    if future.cancelled() or future.exception() is not None:
        return True
    return bool(future.result().fault) or not TRANSIENT.isdisjoint(future.result().reasons)
