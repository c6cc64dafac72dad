"""The program under test, as the test runner sees it: requests and answers over two pipes.

This module runs in the test runner's sandbox; wire.py says what it may import.
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
"""Longest start of the candidate's sandbox."""
BUILT_IN = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class RemoteProgram:
    """The program in the candidate's sandbox.

    Args:
        requests, answers: Pipes to and from the sandbox.
        wall_time_s: Time for all answers, and for everything that the tests do between them, from the first call on.
        output_bytes: Most bytes of one answer.
        begun: Called before the first call.
        lost: Called with the reason when no more answers will come; does not return, so that no test can catch it.
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
        """Returns when the candidate's sandbox is up.

        Raises:
            TimeoutError, EOFError, Malformed, TooLarge: The sandbox does not come up.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        if wire.decode(wire.receive(self._answers, self._output_bytes, deadline)) != {"ready": True}:
            raise wire.Malformed("the candidate's sandbox did not start as it should")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], named: Container[str] = ()) -> Any:
        """Calls a function of the program and returns its value.

        Args:
            named: Names of built-in exceptions that are raised as they are.

        Raises:
            Exception: The function raised; see `exception`.
        """
        answer = self._ask({"call": name, "args": args, "kwargs": kwargs})
        if "raised" in answer:
            raise exception(str(answer["raised"]), str(answer["text"]), named)
        return answer["value"]

    def run(self, stdin: str) -> tuple[str, int]:
        """Runs the whole program and returns its standard output and exit code.

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
    """The program raised an exception that its tests do not name."""


def exception(name: str, text: str, named: Container[str] = ()) -> Exception:
    """The exception that stands in a test for one that the program raised.

    It is of the program's class where that is built in and the test names it or one of its bases, and else `Raised`:
    Python takes some exceptions for an answer without any `except`. StopIteration, which therefore never arrives, ends
    a loop over the cases as if all had passed; IndexError does in `__getitem__`; AttributeError makes `getattr` return
    its default.
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
    """Names of the built-in exceptions that occur in a test, except Exception itself."""
    return {kind.__name__ for name, kind in BUILT_IN.items() if name in code} - {"Exception"}
