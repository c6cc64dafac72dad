"""Checks that the function of a reward can be imported on this host, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile

from rlhf.errors import ConfigError
from settings.reward import RewardTable
from settings.service import ServiceTable

FIND_FUNCTION = """
import json, os, sys
from rlhf.errors import ConfigError
from services.reward.functions import find_function
cause = ""
try:
    find_function(sys.argv[1], json.load(sys.stdin))
except ConfigError as error:
    cause = " ".join(str(error).split())
print(cause, file=sys.stderr, flush=True)
os._exit(1 if cause else 0)
"""
"""Program that prints why a reward function cannot be found, as its last line. Threads and processes that the
function's module has started end with it."""


def check_function(name: str, table: ServiceTable) -> None:
    """Raises ConfigError where the function of a reward cannot be imported, needs a package that is not installed, or
    does not take its options. A process of its own imports it, from the working directory, as the service does."""
    if not isinstance(table, RewardTable) or table.kind != "function":
        return
    # Not as an argument, which every user of the host can read: options may be secrets.
    given = json.dumps(table.options)
    code, said = run_to_end(
        [sys.executable, "-c", FIND_FUNCTION, table.function], table.startup_timeout_s, given
    )
    if code is None:
        cause = f"function: {table.function!r} takes more than {table.startup_timeout_s:g} s to import"
        raise ConfigError(f"services.{name}.{cause}")
    if code:
        ended = f"function: the import of {table.function!r} ended with status {code}"
        raise ConfigError(f"services.{name}.{said[-1] if code == 1 and said else ended}")


def run_to_end(command: list[str], timeout_s: float, given: str = "") -> tuple[int | None, list[str]]:
    """Executes a command with the text `given` as standard input, and then ends all that it has started and that is in
    its process group. Returns its status, None where it did not end in time, and the lines on its stderr."""
    # Files: a pipe would not end before the processes that the command has started.
    with tempfile.TemporaryFile() as stderr, open(os.memfd_create("rlhf-check"), "w+b") as stdin:
        stdin.write(given.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stderr.seek(0)
        return code, stderr.read().decode(errors="replace").strip().splitlines()
