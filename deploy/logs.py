"""Reads from a service's log why it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from deploy.processes import POLL_S

FATAL = "fatal: "
"""Prefix of the line in which a service reports an error that its user can mend."""

_TAIL_BYTES = 64 * 1024
_LINE_LIMIT = 400


def explain_exit(ended: Mapping[int, int], ranks: int, log: Path) -> str:
    """One line on why a service ended: how the rank ended that others may have followed, or its first fatal line.

    Args:
        ended: Exit codes, as of `subprocess`, by rank, of those that have ended.
        ranks: Number of ranks.
        log: Log of the service, NAME.log.
    """
    lines = _tail(log)
    # What a signal has killed can say nothing, and its peers only that they miss it.
    killed = [rank for rank, code in ended.items() if code < 0]
    fatal = [line for line in lines if line.startswith(FATAL)]
    if fatal and not killed:
        return fatal[0].removeprefix(FATAL).removeprefix(f"{log.stem}: ")
    failed = [rank for rank, code in ended.items() if code]
    rank = next(iter([*killed, *failed, *ended]))
    return (
        f"rank {rank} {_how_it_ended(ended[rank], lines, log)}"
        if ranks > 1
        else _how_it_ended(ended[rank], lines, log)
    )


def evidence(log: Path) -> str:
    """`: LAST LINE (log: PATH)`, with the last line that says something, if any."""
    return _evidence(_tail(log), log)


def read_lines(logs: Sequence[Path], follow: bool) -> Iterator[tuple[Path, str]]:
    """The lines of some logs, each with its log; with `follow` also those that are added, for ever."""
    with contextlib.ExitStack() as stack:
        files = {log: stack.enter_context(log.open("rb")) for log in logs}
        begun = dict.fromkeys(logs, b"")
        while True:
            for log, file in list(files.items()):
                if new := _begun_anew(log, file):
                    files[log], begun[log] = stack.enter_context(new), b""
                *lines, begun[log] = (begun[log] + files[log].read()).split(b"\n")
                yield from ((log, line.decode(errors="replace")) for line in lines)
            if not follow:
                yield from ((log, rest.decode(errors="replace")) for log, rest in begun.items() if rest)
                return
            time.sleep(POLL_S)


def _begun_anew(log: Path, file: BinaryIO) -> BinaryIO | None:
    """The log opened again where it was truncated or replaced since `file` was read; a removed one is left as it is."""
    with contextlib.suppress(FileNotFoundError):
        now = log.stat()
        if now.st_size < file.tell() or now.st_ino != os.fstat(file.fileno()).st_ino:
            return log.open("rb")
    return None


def _evidence(lines: list[str], log: Path) -> str:
    own = [line for line in lines if line]
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
