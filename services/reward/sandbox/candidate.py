"""Runs the program to be graded, in its own sandbox, and answers requests of the test runner with plain data.

Once the program runs, this module cannot be trusted: the program shares its process and may change all of it. The
test runner treats every answer as the program's. See wire.py for the modules that may be imported here.
"""

from __future__ import annotations

import builtins
import os
import sys

from services.reward.sandbox import confine, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

NICENESS = 10
"""Niceness of programs, so that the service and the test runners keep their CPU time where there are no control
groups."""
REQUEST_LIMIT = 1 << 30
PROGRAM = "program.py"
SIGKILL = 9


def main() -> None:
    """Serves the test runner: reads requests from the pipe that the job names, and writes answers to the pipe that was
    standard output, until the test runner closes its end. In a forked process, runs the program instead."""
    job = confine.begin()
    os.nice(NICENESS)
    answers, requests = os.dup(1), job["requests"]
    confine.silence(0, 1, 2)
    # `python -S` lacks these; programs that read standard input often end with them.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    program = ProgramRunner(job["code"], job["output_bytes"])
    wire.send(answers, wire.frame(wire.encode({"ready": True})))
    try:
        _serve(program, requests, answers)
    except Forked as run:
        os.dup2(run.stdin, 0)
        os.dup2(run.stdout, 1)
        os.closerange(3, confine.OPEN_FILES)
    # The process ends as any interpreter does: it waits for threads, runs exit handlers and flushes files.
    program.execute("__main__")


def _serve(program: ProgramRunner, requests: int, answers: int) -> NoReturn:
    while True:
        try:
            request = wire.decode(wire.receive(requests, REQUEST_LIMIT))
        except EOFError:
            os._exit(0)
        wire.send(answers, program.answer(request))


class Forked(BaseException):
    """Raised in a forked process that is to run the whole program, to leave the loop that serves the test runner.

    Args:
        stdin, stdout: Descriptors that become the process's descriptors 0 and 1.
    """

    def __init__(self, stdin: int, stdout: int) -> None:
        super().__init__()
        self.stdin, self.stdout = stdin, stdout


class ProgramRunner:
    """Calls functions of a program, or runs it as a whole.

    Args:
        code: Source of the program.
        output_bytes: Maximum size of an answer in bytes.
    """

    def __init__(self, code: str, output_bytes: int) -> None:
        self._code = code
        self._output_bytes = output_bytes
        self._module: ModuleType | None = None

    def answer(self, request: dict[str, Any]) -> bytes:
        """Executes a request and returns the frame of the answer.

        Args:
            request: {"call": name of a function, "args": list, "kwargs": dictionary}, or {"run": text of standard
                input}.

        Raises:
            Forked: In the forked process that is to run the whole program, which does not answer.
        """
        try:
            reply = self._run(request["run"]) if "run" in request else self._call(request)
            return wire.frame(wire.encode(reply), self._output_bytes)
        except Forked:
            raise
        except wire.TooLarge:
            return wire.frame(wire.encode({"too_large": True}))
        except BaseException as error:  # noqa: BLE001 - programs raise anything, SystemExit too
            return wire.frame(wire.encode({"raised": type(error).__name__, "text": _text_of(error)}))

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._module is None:
            self._module = self.execute("__program__")
        function = _find(self._module, request["call"])
        return {"value": function(*request["args"], **request["kwargs"])}

    def execute(self, name: str) -> ModuleType:
        """Executes the program as a new module `name` and returns the module."""
        module = type(sys)(name)
        sys.modules[name] = module
        exec(compile(self._code, PROGRAM, "exec"), module.__dict__)
        return module

    def _run(self, stdin: str) -> dict[str, Any]:
        """Runs the whole program in a forked process, and waits for it; returns its standard output and exit code.
        Processes that it leaves behind end with the sandbox."""
        given = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
        with open(given, "wb", closefd=False) as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        output, end = os.pipe()
        child = os.fork()
        if child == 0:
            raise Forked(given, end)
        os.close(given)
        os.close(end)
        try:
            shown = _read_all(output, self._output_bytes)
        except wire.TooLarge:
            os.kill(child, SIGKILL)
            raise
        finally:
            os.close(output)
            _, status = os.waitpid(child, 0)
        return {"stdout": shown.decode("utf-8", "replace"), "exit": os.waitstatus_to_exitcode(status)}


def _find(module: ModuleType, name: str) -> Callable[..., Any]:
    """Returns the function `name` of the program, or else the method of its class Solution, which some data sets
    use."""
    solution = getattr(module, "Solution", None)
    if not hasattr(module, name) and isinstance(solution, type):
        return getattr(solution(), name)
    return getattr(module, name)


def _read_all(fd: int, limit: int) -> bytes:
    found = bytearray()
    while part := os.read(fd, 1 << 16):
        found += part
        if len(found) > limit:
            raise wire.TooLarge
    return bytes(found)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except Exception:  # noqa: BLE001 - the program's own error, whose text only helps
        return ""
