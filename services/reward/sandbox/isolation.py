"""The interface by which processes that run untrusted code are started, and an implementation without isolation."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError
from services.reward.sandbox import confine, wire
from settings.reward import SandboxTable

END_TIMEOUT_S = 20.0
MIB = 1 << 20
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of the address space that is limited
    "PATH": "/usr/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program has the same verdict
}
SOURCE = Path(__file__).parent
PACKAGE = "services/reward/sandbox"
INTERPRETER = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
"""Path of the service's Python interpreter, without symbolic links."""
MAX_STDERR = 2000


class SandboxFailed(RlhfError):
    """A sandbox did not start, or its limits cannot be enforced. The graded program is not the cause."""


class Process(ABC):
    """A running sandbox: a process that runs untrusted code, and all processes that it has started."""

    @abstractmethod
    def enforce(self) -> None:
        """Ends the sandbox if its processes together exceed a limit that the kernel does not enforce. To be called
        repeatedly, from the first output of the process on.

        Raises:
            SandboxFailed: The resources in use cannot be measured.
        """

    @abstractmethod
    def end(self) -> str:
        """Kills all processes of the sandbox (without isolation: its process group) and waits until they have ended;
        returns the first MAX_STDERR bytes of stderr as text. Raises TimeoutExpired if the sandbox has not ended within
        `END_TIMEOUT_S`."""


class Isolation(ABC):
    """Base class of the ways to start processes that run untrusted code."""

    @abstractmethod
    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int]) -> Process:
        """Starts a process that runs `main` of a module of this package.

        Args:
            module: Module to run, "candidate" or "test_runner".
            job: Plain data that the process reads from its standard input; limits are added.
            stdout: Descriptor that becomes the standard output of the process.
            pass_fds: Further descriptors that the process inherits, under the same numbers.

        Raises:
            SandboxFailed: The process does not start.
            OSError: The service lacks descriptors, memory or processes.
        """


def limits(table: SandboxTable) -> dict[str, int]:
    """Returns the limits of each process in a sandbox, by name in the module `resource`."""
    return {
        "RLIMIT_AS": table.memory_mb * MIB,
        "RLIMIT_CPU": table.cpu_time_s,
        "RLIMIT_NPROC": table.processes,
        "RLIMIT_NOFILE": confine.OPEN_FILES,
        "RLIMIT_FSIZE": table.tmpfs_mb * MIB,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


def python(module: str) -> list[str]:
    """Returns the command that runs `main` of a module of this package, such as "candidate", in an interpreter without
    the module `site`."""
    return [INTERPRETER, "-sSB", "-c", f"from {PACKAGE.replace('/', '.')}.{module} import main; main()"]


def job_file(job: dict[str, Any], limits: dict[str, int], drop_root: bool, keep: Sequence[int]) -> int:
    """Creates a file in memory from which `confine.begin` reads the job; returns its descriptor, which the caller
    closes.

    Args:
        job: Plain data.
        limits: Limits of the process, from `limits`.
        drop_root: Whether the process becomes the unprivileged user.
        keep: Descriptors besides 0, 1 and 2 that stay open.
    """
    return memory_file(wire.encode({**job, "limits": limits, "drop_root": drop_root, "keep": list(keep)}))


def memory_file(content: bytes) -> int:
    """Creates a file in memory with this content; returns its descriptor, at position 0, which the caller closes."""
    fd = os.memfd_create("sandbox")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_readable(fd: int, timeout_s: float) -> bool:
    """Waits up to `timeout_s` seconds and returns whether a descriptor can be read. A pidfd can be read once its
    process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def reap(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a killed process; returns the first MAX_STDERR bytes of its stderr, as text. Only trusted
    code writes there, since `confine.silence` redirects it before untrusted code runs.

    Raises:
        TimeoutExpired: The process has not ended within `END_TIMEOUT_S`.
    """
    assert process.stderr is not None
    with process.stderr as stderr:
        os.set_blocking(stderr.fileno(), False)
        if process.returncode is None:
            # Popen.wait with a timeout sleeps and looks again, twice as long each time.
            ended = os.pidfd_open(process.pid)
            is_readable(ended, END_TIMEOUT_S)
            os.close(ended)
        process.wait(0)
        return (stderr.read(MAX_STDERR) or b"").decode("utf-8", "replace").strip()


class Unsandboxed(Isolation):
    """Starts the same processes without isolation: with limits per process, but with all rights of the service."""

    def __init__(self, table: SandboxTable) -> None:
        self._limits = limits(table)
        # Counted over all processes of the user, so it would stop the service itself.
        del self._limits["RLIMIT_NPROC"]

    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int]) -> Process:
        stdin = job_file(job, self._limits, False, pass_fds)
        try:
            directory = tempfile.TemporaryDirectory(prefix="rlhf-unsandboxed-")
            process = subprocess.Popen(
                python(module),
                env={**ENVIRONMENT, "PYTHONPATH": str(SOURCE.parents[2])},
                stdin=stdin, stdout=stdout, stderr=subprocess.PIPE,
                pass_fds=pass_fds, start_new_session=True, cwd=directory.name,
            )  # fmt: skip
        finally:
            os.close(stdin)
        return _UnsandboxedProcess(process, directory)


class _UnsandboxedProcess(Process):
    def __init__(self, process: subprocess.Popen[bytes], directory: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._directory = directory

    def enforce(self) -> None:
        """Does nothing, since limits on all processes together are not enforced without a sandbox."""

    def end(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            return reap(self._process)
        finally:
            self._directory.cleanup()
