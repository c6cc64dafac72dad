"""Access of the test runner to the program under test, by requests and answers over two pipes.

This module runs in the test runner's sandbox; see wire.py for the modules that may be imported here.
"""

from __future__ import annotations

import builtins
import os
import time

from services.reward.sandbox import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from typing import Any, NoReturn

START_TIMEOUT_S = 60.0
"""Maximum seconds in which the candidate's sandbox starts."""
BUILT_IN = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class RemoteProgram:
    """Proxy of the program in the candidate's sandbox.

    Args:
        requests, answers: Descriptors of the pipes to and from the candidate's sandbox.
        wall_time_s: Time limit in seconds, from the first call on, for all answers and the tests' own work between
            them.
        output_bytes: Maximum size of one answer in bytes.
        begun: Called before the first call of the program.
        lost: Called with the reason, one of `grader.REASONS`, when the program will answer no more. It must not
            return, so that no test can catch it.
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
        """Whether the program has been called."""
        return self._deadline is not None

    def wait_until_ready(self) -> None:
        """Waits until the candidate's sandbox has started.

        Raises:
            TimeoutError, EOFError, Malformed, TooLarge: The sandbox did not say within START_TIMEOUT_S that it is
                ready.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        if wire.decode(wire.receive(self._answers, self._output_bytes, deadline)) != {"ready": True}:
            raise wire.Malformed("the candidate's sandbox did not start as it should")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], named: Container[str] = ()) -> Any:
        """Calls a function of the program and returns its value. Calls `lost` if there is no valid answer in time.

        Args:
            name: Name of the function.
            args, kwargs: Arguments; plain data.
            named: Names of built-in exceptions that are raised as they are, not as `Raised`. Default: none.

        Raises:
            Exception: The function raised an exception; see `exception`.
        """
        answer = self._ask({"call": name, "args": args, "kwargs": kwargs})
        if "raised" in answer:
            raise exception(str(answer["raised"]), str(answer["text"]), named)
        return answer["value"]

    def run(self, stdin: str) -> tuple[str, int]:
        """Runs the whole program with `stdin` as standard input; returns its standard output and exit code. Calls the
        constructor's `lost`, which does not return, if there is no valid answer in time.

        Raises:
            Raised: The program cannot be run.
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
    """The program raised an exception that the test does not name."""


def exception(name: str, text: str, named: Container[str] = ()) -> Exception:
    """Returns the exception to raise in a test for one that the program raised.

    It has the same class if that is built in and the test names it or one of its base classes; else it is `Raised`. A
    test that does not expect an exception must not take it for control flow: StopIteration would end a loop over
    cases as if all had passed, as would IndexError in `__getitem__`, and AttributeError would make `getattr` return
    its default. StopIteration is always converted to `Raised`.

    Args:
        name: Name of the class of the program's exception.
        text: Text of the exception.
        named: Names of exceptions that the test contains. Default: none.
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
    """Returns the names of the built-in subclasses of Exception that `code`, the text of a test, contains anywhere,
    even in a comment or as part of a longer name. An alias counts as its class: IOError gives OSError."""
    return {kind.__name__ for name, kind in BUILT_IN.items() if name in code} - {"Exception"}
