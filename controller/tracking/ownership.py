"""The process that a run directory belongs to, by the text of its lock file."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from rlhf.errors import RlhfError

LOCK = ".lock"
"""Name of the file that the process which writes to a run directory holds locked."""


class Ownership:
    """Notices that another process has taken over a run directory: on a file system without locks, or where a lock was
    lost with the connection to its server.

    Args:
        run_dir: The run directory, which this process holds.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._owner = run_dir, _owner(run_dir)

    def check(self) -> None:
        """Raises RlhfError where another process has locked the directory since; the text names it."""
        owner = _owner(self._run_dir)
        if owner and self._owner and owner != self._owner:
            raise RlhfError(
                f"run directory {self._run_dir}: {holder(self._run_dir)} has taken it over; this process writes "
                "nothing more there"
            )


def lock_text() -> str:
    """Returns the text of the lock file of this process, one line: process id, host, and a random text, which differs
    from call to call."""
    return f"{os.getpid()} {socket.gethostname()} {secrets.token_hex(8)}\n"


def holder(run_dir: Path) -> str:
    """Returns the process that has locked a run directory, for messages."""
    process, _, rest = _owner(run_dir).partition(" ")
    host = rest.partition(" ")[0]
    return f"process {process} of host {host}" if host else "another process"


def _owner(run_dir: Path) -> str:
    """Returns the text of the lock file; empty where there is none."""
    try:
        return (run_dir / LOCK).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
