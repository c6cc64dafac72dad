"""Reads the logs of services: why a service ended, and lines as they are added."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.processes import POLL_S
from rlhf.signals import name_of

FATAL = "fatal: "
"""Prefix of the line in which a service reports why it ends."""
READY = "ready: "
"""Prefix of the line in which a service reports that it serves, which is no cause of its end."""

_TAIL_BYTES = 64 * 1024
_LINE_LIMIT = 400


def explain_exit(ended: Mapping[int, int], ranks: int, log: Path, since: int = 0) -> str:
    """Returns one line on why a service ended. Where no signal killed a rank and the end of the log has a line that
    begins with `FATAL`, this is the first such line, without the prefix, and with the path of the log where a rank
    ended with code 1, after a traceback. Else it says how one rank ended: a killed one, or else one with an exit code
    other than 0, or else any.

    Args:
        ended: Exit codes, as of `subprocess`, by rank, of the ranks that have ended, at least one.
        ranks: Number of ranks.
        log: Log of the service, NAME.log.
        since: Size of the log, in bytes, when these ranks were started.
    """
    lines = _tail(log, since)
    # A rank that a signal killed logs nothing, and its peers only log that it is gone.
    killed = [rank for rank, code in ended.items() if code < 0]
    fatal = [line for line in lines if line.startswith(FATAL)]
    if fatal and not killed:
        cause = fatal[0].removeprefix(FATAL).removeprefix(f"{log.stem}: ")
        return cause + (_evidence([], log) if 1 in ended.values() else "")
    failed = [rank for rank, code in ended.items() if code]
    rank = next(iter([*killed, *failed, *ended]))
    return (
        f"rank {rank} {_how_it_ended(ended[rank], lines, log)}"
        if ranks > 1
        else _how_it_ended(ended[rank], lines, log)
    )


def evidence(log: Path, since: int = 0) -> str:
    """Returns the text `: LAST LINE (log: PATH)`, with the last line of the log that is neither empty nor says that the
    service is ready, cut to `_LINE_LIMIT` characters; ` (log: PATH)` where the log has no such line after its first
    `since` bytes, or cannot be read. Also says whether the disk of the log is full."""
    return _evidence(_tail(log, since), log)


def size_of(log: Path) -> int:
    """Returns the size of a log in bytes; 0 where there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def read_lines(logs: Sequence[Path], follow: bool) -> Iterator[tuple[Path, str]]:
    """Yields (log, line) for each line of some logs. With `follow`, also yields lines that are added, and never ends;
    a log that is truncated or replaced is read from its start. Raises OSError where a log does not exist."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(_LogReader(log))) for log in logs]
        while True:
            for reader in readers:
                yield from ((reader.log, line) for line in reader.new_lines())
            if not follow:
                yield from ((reader.log, rest) for reader in readers if (rest := reader.unfinished_line()))
                return
            time.sleep(POLL_S)


class _LogReader:
    """Reads a log as it grows.

    Raises:
        OSError: There is no log of this name to begin with.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._file = log.open("rb")
        self._begun = b""

    def new_lines(self) -> Iterator[str]:
        """Yields the lines that were completed since the last call. Where the log was truncated or replaced meanwhile,
        yields the rest of the old content, even without a line feed, and then the lines of the new one."""
        yield from self._lines_of_file()
        if self._starts_anew():
            if rest := self.unfinished_line():
                yield rest
            self._begun = b""
            yield from self._lines_of_file()

    def unfinished_line(self) -> str:
        """Returns the text read so far after the last line feed; empty where there is none."""
        return self._begun.decode(errors="replace")

    def close(self) -> None:
        self._file.close()

    def _lines_of_file(self) -> Iterator[str]:
        *lines, self._begun = (self._begun + self._file.read()).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)

    def _starts_anew(self) -> bool:
        """Whether the log was truncated or replaced; if so, goes to the start of its content."""
        opened = os.fstat(self._file.fileno())
        if opened.st_size < self._file.tell():
            self._file.seek(0)
            return True
        try:
            named = self.log.stat()
            if os.path.samestat(named, opened):
                return False
            replacement = self.log.open("rb")
        except FileNotFoundError:  # removed; another may come
            return False
        self._file.close()
        self._file = replacement
        return True


def _evidence(lines: list[str], log: Path) -> str:
    own = [line for line in lines if line and not line.startswith(READY)]
    last = f": {own[-1].lstrip()[:_LINE_LIMIT]}" if own else ""
    return f"{last} (log: {log}{', whose disk is full' if _is_disk_full(log) else ''})"


def _is_disk_full(log: Path) -> bool:
    """Whether nothing can be written any longer beside a log; its last lines may then be missing. A file system that
    does not say its size counts as not full."""
    try:
        disk = os.statvfs(log.parent)
        return disk.f_blocks > 0 and disk.f_bavail == 0
    except OSError:
        return False


def _tail(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(since, size_of(log) - _TAIL_BYTES))
            # Of bytes, since a text ends lines at further characters, which a peer may have sent.
            return [line.decode(errors="replace").rstrip() for line in file.read().splitlines()]
    except OSError:
        return []


def _how_it_ended(code: int, lines: list[str], log: Path) -> str:
    if code >= 0:
        return f"exited with code {code}{_evidence(lines, log)}"
    # A killed rank logs nothing: the last line is older, or another rank's.
    said = [] if code == -signal.SIGKILL else lines
    return f"was killed by {name_of(-code)}{_evidence(said, log)}"
