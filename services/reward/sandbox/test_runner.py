"""Runs tests against a program that runs in another sandbox, and reports which of them the program passed.

The test runner has the tests but not the program's code, and receives only plain data from the program. It runs in a
sandbox too, since tests are code of a data set, and handle values that the program returns. See wire.py for the
modules that may be imported here.
"""

from __future__ import annotations

import os
import time

from services.reward.sandbox import confine, wire
from services.reward.sandbox.remote_program import RemoteProgram
from services.reward.sandbox.test_kinds import MAX_CAUSE, Test, Unusable, described, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

READY, VALID, BEGUN = b"1", b"2", b"3"
"""Stages, one byte each, that are sent to the service. READY: both sandboxes have started. VALID: all tests are valid.
BEGUN: the program is called for the first time; only failures after this stage count as the program's."""


def main() -> None:
    """Tests one program, writes the stages and then the verdict, as a frame, to the pipe that was standard output, and
    ends the process."""
    job = confine.begin()
    service = os.dup(1)
    confine.silence(0, 1, 2)
    tests, reasons = [wire.decode(test) for test in job["tests"]], []

    def conclude(**verdict: Any) -> NoReturn:
        wire.send(service, wire.frame(wire.encode(verdict)))
        os._exit(0)

    def lost(reason: str) -> NoReturn:
        conclude(reasons=[*reasons, *[reason] * (len(tests) - len(reasons))])

    program = RemoteProgram(
        job["requests"], job["answers"], job["wall_time_s"], job["output_bytes"],
        lambda: os.write(service, BEGUN), lost,
    )  # fmt: skip

    def unusable(number: int, error: Unusable) -> NoReturn:
        conclude(fault=f"test {number}: {error}"[:MAX_CAUSE])

    def valid(number: int, deadline: float) -> Test:
        try:
            test = load(tests[number], job["prelude"])
            test.check(deadline)
            return test
        except Unusable as error:
            unusable(number, error)

    try:
        program.wait_until_ready()
        os.write(service, READY)
        deadline = time.monotonic() + job["wall_time_s"]
        loaded = [valid(number, deadline) for number in range(len(tests))]
        os.write(service, VALID)
        for test in loaded:
            reasons.append(test.put_to(program))
    except Unusable as error:
        unusable(len(reasons), error)
    except (TimeoutError, EOFError, wire.Malformed, wire.TooLarge) as error:
        conclude(fault=f"the candidate's sandbox did not start: {described(error)}")
    conclude(reasons=reasons)
