"""Puts tests to a program that runs in another sandbox, and says which of them it passed.

The judge has the tests and never the program's code; all it learns of the program is plain data. It runs in a
sandbox of its own all the same: tests are code out of a data set, and the values they meet are the program's.
Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from services.reward.sandbox import confine, wire

TESTING = b" "
"""Sent to the parent when a test begins: until it first calls the program, what goes wrong is its own doing."""
BEGUN = b"\n"
"""Sent to the parent before a test first calls the program: what goes wrong from here on is the program's doing."""
START_TIMEOUT_S = 20.0
"""Longest that the candidate's sandbox takes to start."""


class Candidate:
    """The program, as far as the judge knows it.

    Args:
        channel: Socket to its sandbox.
        wall_time_s: Time for all its answers, and all that the tests do between them, from the first call on.
        output_bytes: Most bytes of one answer.
        say: Called with `TESTING` and `BEGUN`.
        lost: Called with the reason when there will be no more answers; does not return, so that no test can
            catch it.
    """

    def __init__(
        self,
        channel: int,
        wall_time_s: float,
        output_bytes: int,
        say: Callable[[bytes], object],
        lost: Callable[[str], NoReturn],
    ) -> None:
        os.set_blocking(channel, False)
        self._channel = channel
        self._wall_time_s = wall_time_s
        self._output_bytes = output_bytes
        self._say = say
        self._lost = lost
        self._deadline: float | None = None
        self.num_calls = 0

    def wait_until_ready(self) -> None:
        """Returns when its sandbox is up.

        Raises:
            TimeoutError, EOFError, Malformed, TooLarge: It does not come up.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        if wire.unpack(wire.receive(self._channel, self._output_bytes, deadline)) != {"ready": True}:
            raise wire.Malformed("the candidate's sandbox did not start as it should")

    def begin_test(self) -> None:
        """From here on, `num_calls` counts the calls of another test."""
        self.num_calls = 0
        self._say(TESTING)

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of the program returns.

        Raises:
            Exception: It raised something of this built-in class, or of one that is not built in.
        """
        request = {"call": name, "args": wire.encode(args), "kwargs": wire.encode(kwargs)}
        answer = self._ask(request)
        if "raised" in answer:
            raise _exception(answer)
        return wire.decode(answer["value"])

    def run(self, stdin: str) -> tuple[str, int]:
        """Standard output and exit code of the whole program.

        Raises:
            Exception: It could not be run.
        """
        answer = self._ask({"run": stdin})
        if "raised" in answer:
            raise _exception(answer)
        return str(answer["stdout"]), int(answer["exit"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._wall_time_s
        if self.num_calls == 0:
            self._say(BEGUN)
        self.num_calls += 1
        try:
            wire.send(self._channel, wire.pack(request, sys.maxsize), self._deadline)
            answer = wire.unpack(wire.receive(self._channel, self._output_bytes, self._deadline))
        except TimeoutError:
            self._lost("timeout")
        except (EOFError, ConnectionError):
            self._lost("died")
        except wire.TooLarge:
            self._lost("output_limit")
        except wire.Malformed:
            self._lost("malformed")
        expected = {"stdout", "exit"} if "run" in request else {"value"}
        if answer == {"too_large": True}:
            self._lost("output_limit")
        if not isinstance(answer, dict) or set(answer) not in (expected, {"raised", "text"}):
            self._lost("malformed")
        return answer


def _exception(answer: dict[str, Any]) -> Exception:
    kind = getattr(builtins, str(answer["raised"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        # SystemExit and its like would end the judge, or tests, without a word.
        kind = Exception
    elif issubclass(kind, StopIteration | StopAsyncIteration):
        # As in a generator (PEP 479): in `all(map(...))`, it would end the loop over the cases as if all had passed.
        kind = RuntimeError
    try:
        return kind(str(answer["text"]))
    except TypeError:
        return Exception(f"{answer['raised']}: {answer['text']}")


class Unusable(Exception):
    """Tests that fail by themselves: no verdict on any program."""


def load(test: dict[str, Any], prelude: str) -> Callable[[Candidate], str]:
    """A test as a function of the candidate that returns "" where it passed, or else a reason.

    Raises:
        Unusable: The tests are broken.
    """
    if test["kind"] == "call":
        return lambda candidate: _call(test, candidate)
    if test["kind"] == "stdin":
        return lambda candidate: _stdin(test, candidate)
    try:
        code = compile(test["code"], "tests.py", "exec")
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(prelude, "prelude.py", "exec"), names)
    except Exception as error:
        raise Unusable(f"the tests do not load: {type(error).__name__}: {error}") from error
    return lambda candidate: _asserts(code, names, test["entry_point"], candidate)


def _call(test: dict[str, Any], candidate: Candidate) -> str:
    try:
        value = candidate.call(test["function"], test["args"], test["kwargs"])
    except wire.Malformed:
        return "malformed"
    except Exception:  # noqa: BLE001 - whatever class the program's exception was given
        return "raised"
    tolerance = test["tolerance"]
    return "" if any(agree(value, expected, tolerance) for expected in test["accepted"]) else "wrong"


def _stdin(test: dict[str, Any], candidate: Candidate) -> str:
    try:
        output, code = candidate.run(test["input"])
    except Exception:  # noqa: BLE001 - see _call
        return "raised"
    if code != 0:
        return "raised"
    return "" if lines(output) == lines(test["expected"]) else "wrong"


def _asserts(code: Any, names: dict[str, Any], entry_point: str, candidate: Candidate) -> str:
    def proxy(*args: Any, **kwargs: Any) -> Any:
        return candidate.call(entry_point, list(args), kwargs)

    names[entry_point] = proxy
    try:
        exec(code, names)
        if callable(check := names.get("check")):
            check(proxy)
        reason = ""
    except BaseException as error:
        if candidate.num_calls == 0:
            raise Unusable(f"the tests fail by themselves: {type(error).__name__}: {error}") from error
        reason = "malformed" if isinstance(error, wire.Malformed) else "wrong"
    if candidate.num_calls == 0:
        raise Unusable(f"the tests never call {entry_point}")
    return reason


def agree(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether a value is the one expected: as Python's ==, except that a tuple agrees with a list, for JSON has no
    tuples, and that floats may be apart by `tolerance`, relative or absolute."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        same_length = len(value) == len(expected)
        return same_length and all(agree(v, e, tolerance) for v, e in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(agree(value[k], expected[k], tolerance) for k in value)
    if tolerance and isinstance(value, float | int) and isinstance(expected, float | int):
        with contextlib.suppress(OverflowError):
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def lines(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def main() -> None:
    """Judges one program; the verdict goes to standard output, as one JSON object."""
    job = confine.begin()
    verdicts = os.dup(1)
    confine.silence(0, 1, 2)
    reasons: list[str] = []
    tests = job["tests"]

    def conclude(**verdict: Any) -> NoReturn:
        os.write(verdicts, wire.pack(verdict, sys.maxsize)[wire.HEADER_BYTES :])
        os._exit(0)

    def lost(reason: str) -> NoReturn:
        conclude(reasons=[*reasons, *[reason] * (len(tests) - len(reasons))])

    def say(word: bytes) -> None:
        os.write(verdicts, word)

    candidate = Candidate(job["channel"], job["wall_time_s"], job["output_bytes"], say, lost)
    try:
        loaded = [load(test, job["prelude"]) for test in tests]
        candidate.wait_until_ready()
        for test in loaded:
            candidate.begin_test()
            reasons.append(test(candidate))
    except Unusable as error:
        conclude(fault=str(error)[:500])
    except (TimeoutError, EOFError, wire.Malformed, wire.TooLarge) as error:
        conclude(fault=f"the candidate's sandbox did not start: {type(error).__name__} {error}")
    conclude(reasons=reasons)
