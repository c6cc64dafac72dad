"""The kinds of tests, each of which runs itself against a program.

This module runs in the test runner's sandbox; see wire.py for the modules that may be imported here.
"""

from __future__ import annotations

import math
import os
import select
import time

from services.reward.sandbox import wire
from services.reward.sandbox.remote_program import Raised, named_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any, NoReturn

    from services.reward.sandbox.remote_program import RemoteProgram

MAX_CAUSE = 500
"""Maximum length of the cause of a fault, in characters and in bytes."""
SIGKILL = 9


class Unusable(Exception):
    """A test fails without the program, so that no program can be graded by it."""


class CallTest:
    """Test that calls a function of the program and compares its value with the accepted ones."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = test["function"], test["args"], test["kwargs"]
        self._accepted, self._tolerance = test["accepted"], test["tolerance"]

    def check(self, deadline: float) -> None:
        """Does nothing, since this test has no code that could fail without the program."""

    def put_to(self, program: RemoteProgram) -> str:
        """Runs the test; returns the reason why the program does not pass it, or "" if it passes."""
        try:
            value = program.call(self._function, self._args, self._kwargs)
        except Raised:
            return "raised"
        return "" if any(agree(value, accepted, self._tolerance) for accepted in self._accepted) else "wrong"


class InputTest:
    """Test that runs the whole program with a standard input and compares its standard output with the expected
    one."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._input, self._expected = test["input"], test["expected"]

    def check(self, deadline: float) -> None:
        """Does nothing, since this test has no code that could fail without the program."""

    def put_to(self, program: RemoteProgram) -> str:
        """Runs the test; returns the reason why the program does not pass it, or "" if it passes."""
        try:
            output, code = program.run(self._input)
        except Raised:
            return "raised"
        if code != 0:
            return "raised"
        return "" if lines(output) == lines(self._expected) else "wrong"


class AssertsTest:
    """Test that runs code, such as assert statements, which calls a function of the program by the name
    `entry_point`.

    Args:
        test: The test, in the form of docs/sandbox.md.
        prelude: Source code that is executed first and whose names the test may use.

    Raises:
        Unusable: The code does not compile, or the prelude raises.
    """

    def __init__(self, test: dict[str, Any], prelude: str) -> None:
        self._entry_point = test["entry_point"]
        self._names: dict[str, Any] = {"__name__": "tests"}
        self._named = named_in(test["code"])
        try:
            self._code: CodeType = compile(test["code"], "tests.py", "exec")
            exec(compile(prelude, "prelude.py", "exec"), self._names)
        except BaseException as error:
            raise Unusable(f"does not load: {described(error)}") from error

    def check(self, deadline: float) -> None:
        """Checks that the code reaches its first call of the program, by running it up to there in a forked process.

        Args:
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            Unusable: The code ends, raises or exceeds the deadline before it calls the program.
        """
        causes, end = os.pipe()
        child = os.fork()
        if child == 0:
            self._rehearse(lambda cause: os.write(end, cause.encode("utf-8", "replace")[:MAX_CAUSE]))
        os.close(end)
        poll = select.poll()
        poll.register(causes, select.POLLIN)
        came = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        cause = os.read(causes, MAX_CAUSE).decode("utf-8", "replace") if came else "time is up"
        os.kill(child, SIGKILL)
        os.waitpid(child, 0)
        os.close(causes)
        if cause != self._entry_point:
            raise Unusable(f"{cause or 'it ends'} before it calls {self._entry_point}")

    def _rehearse(self, say: Callable[[str], object]) -> NoReturn:
        """Runs the code in the forked process. Passes to `say` the name of the entry point once it is called, or else
        why it was not called; then ends the process."""

        def call(*args: Any, **kwargs: Any) -> NoReturn:
            try:
                wire.encode([list(args), kwargs])
                say(self._entry_point)
            except wire.Malformed as error:
                say(f"fails by itself: argument of {self._entry_point}: {error}")
            os._exit(0)

        try:
            self._run(call)
            say("it ends")
        except BaseException as error:  # noqa: BLE001 - tests may raise anything
            say(f"fails by itself: {described(error)}")
        os._exit(0)

    def put_to(self, program: RemoteProgram) -> str:
        """Runs the test; returns the reason why the program does not pass it, or "" if it passes.

        Raises:
            Unusable: The code fails, or ends, before it has called the program.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return program.call(self._entry_point, list(args), kwargs, self._named)

        try:
            self._run(call)
            reason = ""
        except BaseException as error:
            if not program.was_called:
                raise Unusable(f"fails by itself: {described(error)}") from error
            reason = "raised" if isinstance(error, Raised) else "wrong"
        if not program.was_called:
            raise Unusable(f"ends before it calls {self._entry_point}")
        return reason

    def _run(self, call: Callable[..., Any]) -> None:
        self._names[self._entry_point] = call
        exec(self._code, self._names)
        if callable(check := self._names.get("check")):
            check(call)


def described(error: BaseException) -> str:
    """Returns the class and the text of an exception, as in "ValueError: text"."""
    return f"{type(error).__name__}: {error}"


Test = CallTest | InputTest | AssertsTest


def load(test: dict[str, Any], prelude: str) -> Test:
    """Creates a test from its description.

    Args:
        test: The test in the form of docs/sandbox.md, with all defaults filled in.
        prelude: Source code whose names a test of kind "asserts" may use.

    Raises:
        Unusable: The code of the test does not compile, or the prelude raises.
    """
    if test["kind"] == "call":
        return CallTest(test)
    return InputTest(test) if test["kind"] == "stdin" else AssertsTest(test, prelude)


def agree(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Returns whether a value equals the expected one by Python's ==, with two exceptions: a tuple equals a list with
    the same items, since JSON has no tuples; and numbers may differ by `tolerance`, relative or absolute (default
    0)."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        same_length = len(value) == len(expected)
        return same_length and all(agree(v, e, tolerance) for v, e in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(agree(value[k], expected[k], tolerance) for k in value)
    if tolerance and isinstance(value, float | int) and isinstance(expected, float | int):
        try:
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            pass
    return bool(value == expected)


def lines(text: str) -> list[str]:
    """Returns the lines of a text without trailing whitespace, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
