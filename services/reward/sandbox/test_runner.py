"""Puts tests to a program that runs in another sandbox, and says which of them it passed.

The test runner has the tests and never the program's code; all it learns of the program is plain data. It runs in a
sandbox of its own all the same: tests are code out of a data set, and the values they meet are the program's.
See wire.py on what it may import.
"""

from __future__ import annotations

import builtins
import math
import os
import select
import time

from services.reward.sandbox import confine, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from types import CodeType
    from typing import Any, NoReturn

READY, VALID, BEGUN = b"1", b"2", b"3"
"""Told to the service: both sandboxes are up; the tests are whole; the program is called for the first time. What goes
wrong before that is not the program's doing. What goes wrong after it is."""
START_TIMEOUT_S = 60.0
"""Longest that the candidate's sandbox takes to start."""
MAX_CAUSE = 500
SIGKILL = 9
BUILT_IN = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Candidate:
    """The program, as far as the test runner knows it.

    Args:
        requests, answers: Pipes to and from its sandbox.
        wall_time_s: Time for all its answers, and all that the tests do between them, from the first call on.
        output_bytes: Most bytes of one answer.
        begun: Called before the first call.
        lost: Called with the reason when there will be no more answers; does not return, so that no test can
            catch it.
    """

    def __init__(
        self,
        requests: int,
        answers: int,
        wall_time_s: float,
        output_bytes: int,
        begun: Callable[[], object],
        lost: Callable[[str], NoReturn],
    ) -> None:
        os.set_blocking(requests, False)
        os.set_blocking(answers, False)
        self._requests, self._answers = requests, answers
        self._wall_time_s = wall_time_s
        self._output_bytes = output_bytes
        self._begun = begun
        self._lost = lost
        self._deadline: float | None = None

    @property
    def was_called(self) -> bool:
        """Whether any of the program has run."""
        return self._deadline is not None

    def wait_until_ready(self) -> None:
        """Returns when its sandbox is up.

        Raises:
            TimeoutError, EOFError, Malformed, TooLarge: It does not come up.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        if wire.decode(wire.receive(self._answers, self._output_bytes, deadline)) != {"ready": True}:
            raise wire.Malformed("the candidate's sandbox did not start as it should")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], named: Container[str] = ()) -> Any:
        """The value that a function of the program returns.

        Args:
            named: Exceptions that may arrive as what they are.

        Raises:
            Exception: It raised something; see `exception`.
        """
        answer = self._ask({"call": name, "args": args, "kwargs": kwargs})
        if "raised" in answer:
            raise exception(str(answer["raised"]), str(answer["text"]), named)
        return answer["value"]

    def run(self, stdin: str) -> tuple[str, int]:
        """Standard output and exit code of the whole program.

        Raises:
            Raised: It could not be run.
        """
        answer = self._ask({"run": stdin})
        if "raised" in answer:
            raise exception(str(answer["raised"]), str(answer["text"]))
        output, code = answer["stdout"], answer["exit"]
        if not (isinstance(output, str) and isinstance(code, int)):
            self._lost("malformed")
        return output, code

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = wire.frame(wire.encode(request))
        if self._deadline is None:
            self._begun()
            self._deadline = time.monotonic() + self._wall_time_s
        try:
            wire.send(self._requests, asked, self._deadline)
            answer = wire.decode(wire.receive(self._answers, self._output_bytes, self._deadline))
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


class Raised(Exception):
    """The program raised an exception that its tests do not name."""


def exception(name: str, text: str, named: Container[str] = ()) -> Exception:
    """The exception that stands in a test for one of the program's.

    It is of the program's class where that is built in and the test names it or one of its bases, and else `Raised`:
    some exceptions are an answer to Python where no `except` asks for them. StopIteration, which therefore never
    arrives, ends a loop over the cases as if all had passed; IndexError does in `__getitem__`; AttributeError makes
    `getattr` return its default.
    """
    kind = BUILT_IN.get(name)
    if kind is not None and not issubclass(kind, StopIteration | StopAsyncIteration):
        try:
            if any(base.__name__ in named for base in kind.__mro__):
                return kind(text)
        except TypeError:  # some take more than a text
            pass
    return Raised(f"{name}: {text}")


def named_in(code: str) -> set[str]:
    """The built-in exceptions, all but Exception itself, whose names stand in a test."""
    return {kind.__name__ for name, kind in BUILT_IN.items() if name in code} - {"Exception"}


class Unusable(Exception):
    """Tests that fail by themselves: no verdict on any program."""


class CallTest:
    """A function is called, and its value compared."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = test["function"], test["args"], test["kwargs"]
        self._accepted, self._tolerance = test["accepted"], test["tolerance"]

    def check(self, deadline: float) -> None:
        """There is nothing in it that could fail by itself."""

    def put_to(self, candidate: Candidate) -> str:
        """The reason for which the candidate fails; empty where it passes."""
        try:
            value = candidate.call(self._function, self._args, self._kwargs)
        except Raised:
            return "raised"
        return "" if any(agree(value, accepted, self._tolerance) for accepted in self._accepted) else "wrong"


class InputTest:
    """The program is run, and what it writes compared."""

    def __init__(self, test: dict[str, Any]) -> None:
        self._input, self._expected = test["input"], test["expected"]

    def check(self, deadline: float) -> None:
        """There is nothing in it that could fail by itself."""

    def put_to(self, candidate: Candidate) -> str:
        """The reason for which the candidate fails; empty where it passes."""
        try:
            output, code = candidate.run(self._input)
        except Raised:
            return "raised"
        if code != 0:
            return "raised"
        return "" if lines(output) == lines(self._expected) else "wrong"


class AssertsTest:
    """Code that calls the program by a name.

    Raises:
        Unusable: It does not compile, or the prelude fails.
    """

    def __init__(self, test: dict[str, Any], prelude: str) -> None:
        self._entry_point = test["entry_point"]
        self._names: dict[str, Any] = {"__name__": "tests"}
        self._named = named_in(test["code"])
        try:
            self._code: CodeType = compile(test["code"], "tests.py", "exec")
            exec(compile(prelude, "prelude.py", "exec"), self._names)
        except BaseException as error:
            raise Unusable(f"does not load: {_described(error)}") from error

    def check(self, deadline: float) -> None:
        """Runs it in a process of its own up to where it first calls the program.

        Raises:
            Unusable: It does not get there.
        """
        heard, end = os.pipe()
        child = os.fork()
        if child == 0:
            self._rehearse(lambda cause: os.write(end, cause.encode("utf-8", "replace")[:MAX_CAUSE]))
        os.close(end)
        poll = select.poll()
        poll.register(heard, select.POLLIN)
        came = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        cause = os.read(heard, MAX_CAUSE).decode("utf-8", "replace") if came else "time is up"
        os.kill(child, SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        if cause != self._entry_point:
            raise Unusable(f"{cause or 'it ends'} before it calls {self._entry_point}")

    def _rehearse(self, say: Callable[[str], object]) -> NoReturn:
        """Says the entry point when it is called, or else why it is not; ends the process."""

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
            say(f"fails by itself: {_described(error)}")
        os._exit(0)

    def put_to(self, candidate: Candidate) -> str:
        """The reason for which the candidate fails; empty where it passes.

        Raises:
            Unusable: It fails before any of the program has run.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return candidate.call(self._entry_point, list(args), kwargs, self._named)

        try:
            self._run(call)
            reason = ""
        except BaseException as error:
            if not candidate.was_called:
                raise Unusable(f"fails by itself: {_described(error)}") from error
            reason = "wrong"
        if not candidate.was_called:
            raise Unusable(f"ends before it calls {self._entry_point}")
        return reason

    def _run(self, call: Callable[..., Any]) -> None:
        self._names[self._entry_point] = call
        exec(self._code, self._names)
        if callable(check := self._names.get("check")):
            check(call)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


Test = CallTest | InputTest | AssertsTest


def load(test: dict[str, Any], prelude: str) -> Test:
    """A test of docs/sandbox.md, with all defaults filled in.

    Raises:
        Unusable: It is broken.
    """
    if test["kind"] == "call":
        return CallTest(test)
    return InputTest(test) if test["kind"] == "stdin" else AssertsTest(test, prelude)


def agree(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether a value is the one expected: as Python's ==, except that a tuple agrees with a list, for JSON has no
    tuples, and that numbers may be apart by `tolerance`, relative or absolute."""
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
    """Lines without spaces at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def main() -> None:
    """Tests one program; the verdict goes to standard output, as a frame behind the stages."""
    job = confine.begin()
    service = os.dup(1)
    confine.silence(0, 1, 2)
    tests, reasons = [wire.decode(test) for test in job["tests"]], []

    def conclude(**verdict: Any) -> NoReturn:
        wire.send(service, wire.frame(wire.encode(verdict)))
        os._exit(0)

    def lost(reason: str) -> NoReturn:
        conclude(reasons=[*reasons, *[reason] * (len(tests) - len(reasons))])

    candidate = Candidate(
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
        candidate.wait_until_ready()
        os.write(service, READY)
        deadline = time.monotonic() + job["wall_time_s"]
        loaded = [valid(number, deadline) for number in range(len(tests))]
        os.write(service, VALID)
        for test in loaded:
            reasons.append(test.put_to(candidate))
    except Unusable as error:
        unusable(len(reasons), error)
    except (TimeoutError, EOFError, wire.Malformed, wire.TooLarge) as error:
        conclude(fault=f"the candidate's sandbox did not start: {_described(error)}")
    conclude(reasons=reasons)
