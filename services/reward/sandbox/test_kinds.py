"""The kinds of test, and how each is put to a program.

This module runs in the test runner's sandbox; wire.py says what it may import.
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
"""Most characters, and bytes, of the cause of a fault."""
SIGKILL = 9


class Unusable(Exception):
    """Tests that fail by themselves, so that there is no verdict on any program."""


class CallTest:
    """Calls a function of the program and compares its value."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = test["function"], test["args"], test["kwargs"]
        self._accepted, self._tolerance = test["accepted"], test["tolerance"]

    def check(self, deadline: float) -> None:
        """Does nothing: this test cannot fail by itself."""

    def put_to(self, program: RemoteProgram) -> str:
        """The reason why the program fails; "" where it passes."""
        try:
            value = program.call(self._function, self._args, self._kwargs)
        except Raised:
            return "raised"
        return "" if any(agree(value, accepted, self._tolerance) for accepted in self._accepted) else "wrong"


class InputTest:
    """Runs the program and compares its output."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._input, self._expected = test["input"], test["expected"]

    def check(self, deadline: float) -> None:
        """Does nothing: this test cannot fail by itself."""

    def put_to(self, program: RemoteProgram) -> str:
        """The reason why the program fails; "" where it passes."""
        try:
            output, code = program.run(self._input)
        except Raised:
            return "raised"
        if code != 0:
            return "raised"
        return "" if lines(output) == lines(self._expected) else "wrong"


class AssertsTest:
    """Runs code that calls the program by a name.

    Raises:
        Unusable: The code does not compile, or the prelude fails.
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
        """Runs the code, in a process of its own, up to its first call of the program.

        Raises:
            Unusable: The code does not get there.
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
        """Writes the entry point when it is called, or else why it is not; ends the process."""

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
        """The reason why the program fails; "" where it passes.

        Raises:
            Unusable: The code fails before any of the program has run.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return program.call(self._entry_point, list(args), kwargs, self._named)

        try:
            self._run(call)
            reason = ""
        except BaseException as error:
            if not program.was_called:
                raise Unusable(f"fails by itself: {described(error)}") from error
            reason = "wrong"
        if not program.was_called:
            raise Unusable(f"ends before it calls {self._entry_point}")
        return reason

    def _run(self, call: Callable[..., Any]) -> None:
        self._names[self._entry_point] = call
        exec(self._code, self._names)
        if callable(check := self._names.get("check")):
            check(call)


def described(error: BaseException) -> str:
    """The class and text of an exception."""
    return f"{type(error).__name__}: {error}"


Test = CallTest | InputTest | AssertsTest


def load(test: dict[str, Any], prelude: str) -> Test:
    """Loads a test of docs/sandbox.md, with all defaults filled in.

    Raises:
        Unusable: The test is broken.
    """
    if test["kind"] == "call":
        return CallTest(test)
    return InputTest(test) if test["kind"] == "stdin" else AssertsTest(test, prelude)


def agree(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether a value equals the expected one by Python's ==, except that a tuple agrees with a list, for JSON has no
    tuples, and that numbers may differ by `tolerance`, relative or absolute."""
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
    """Lines of a text without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
