"""Runs a command that ends with its parent: `python -m deploy.with_parent PARENT_PID COMMAND [ARGUMENT...]`.

The kernel sends the command SIGTERM when the thread that started it ends, however it ends (PR_SET_PDEATHSIG,
Linux; it is kept across exec and not inherited by children). So start it from a thread that lives as long as
its process: the main one, or one that waits for the command, as in `controller.launch`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def wrap(command: list[str]) -> list[str]:
    """Returns the command line that runs this file, which then runs `command` so that the kernel sends it SIGTERM
    when this process ends. This process has to start it."""
    # -I -S start the wrapper alone without site packages and PYTHON* variables; the command has them again.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def execute(parent: int, command: list[str]) -> None:
    """Replaces this process by `command`, which gets SIGTERM when `parent`, the process that started this one, ends.

    Raises:
        OSError: The kernel refused, or the command does not exist.
        SystemExit: `parent` has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that ended before the request was made sends no signal any more.
    if os.getppid() != parent:
        sys.exit(f"fatal: the parent process {parent} has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    execute(int(sys.argv[1]), sys.argv[2:])
