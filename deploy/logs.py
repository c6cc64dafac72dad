"""What the log of a service says about its end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

FATAL = "fatal: "
"""What the user can mend a service says in one line that starts with this."""

_TAIL_BYTES = 64 * 1024
_LINE_LIMIT = 400
_TORCHRUN_LINE = re.compile(r"[A-Z]\d{4} .* torch/distributed/")
_WORKER_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


def explain_exit(code: int, log: Path) -> str:
    """One line on why a service with this exit code and log, NAME.log, ended: its last fatal line, or else how
    it ended and the evidence."""
    lines = _tail(log)
    fatal = [line for line in lines if line.startswith(FATAL)]
    if fatal:
        return fatal[-1].removeprefix(FATAL).removeprefix(f"{log.stem}: ")
    # torchrun reports the worker that failed first; what follows is its own traceback.
    for number, line in enumerate(lines):
        if failure := _WORKER_FAILURE.search(line):
            return f"rank {failure[2]} {_how_it_ended(int(failure[1]), lines[:number], log)}"
    return _how_it_ended(code, lines, log)


def evidence(log: Path) -> str:
    """`: LAST LINE (log: PATH)`, with the last line that says something and is not torchrun's, if any."""
    return _evidence(_tail(log), log)


def _evidence(lines: list[str], log: Path) -> str:
    own = [line for line in lines if line and not _TORCHRUN_LINE.match(line)]
    last = f": {own[-1][:_LINE_LIMIT]}" if own else ""
    return f"{last} (log: {log})"


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines()]


def _how_it_ended(code: int, lines: list[str], log: Path) -> str:
    if code >= 0:
        return f"exited with code {code}{_evidence(lines, log)}"
    # What is killed says nothing; the last line is of another rank, or of a better time.
    said = [] if code == -signal.SIGKILL else lines
    return f"was killed by {signal.Signals(-code).name}{_evidence(said, log)}"
