"""How a process is started that may run anything: the interface, and the way that isolates nothing."""

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
"""That of the service, by the path at which it lies, whatever links lead there."""
MAX_STDERR = 2000


class SandboxFailed(RlhfError):
    """A sandbox did not start, or cannot be held to its limits, which is no program's fault."""


class Process(ABC):
    """A process that may run anything, and can be ended with all that it started."""

    @abstractmethod
    def enforce(self) -> None:
        """Ends it where its processes together have gone beyond a limit that the kernel does not hold.

        Call it again and again, once the process has said something.

        Raises:
            SandboxFailed: What they use cannot be seen.
        """

    @abstractmethod
    def end(self) -> str:
        """Kills it and everything in its sandbox, waits until all of it is gone, and returns what stderr says."""


class Isolation(ABC):
    """A way to start processes."""

    @abstractmethod
    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int]) -> Process:
        """Starts `main` of one of our modules.

        Args:
            module: "candidate" or "test_runner".
            job: Plain data that it reads on standard input; limits are added.
            stdout: Its descriptor 1.
            pass_fds: Further descriptors it has, under the numbers they have here.

        Raises:
            SandboxFailed: It does not start.
        """


def limits(table: SandboxTable) -> dict[str, int]:
    """Limits of every process, by their name in the module `resource`."""
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
    """The command that runs `main` of one of our modules, in an interpreter without `site`."""
    return [INTERPRETER, "-sSB", "-c", f"from {PACKAGE.replace('/', '.')}.{module} import main; main()"]


def job_file(job: dict[str, Any], limits: dict[str, int], drop_root: bool, keep: Sequence[int]) -> int:
    """A descriptor from which `confine.begin` reads this job; close it."""
    return memory_file(wire.encode({**job, "limits": limits, "drop_root": drop_root, "keep": list(keep)}))


def memory_file(content: bytes) -> int:
    """A descriptor from which this is read; close it."""
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def reap(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a process that was killed; what it wrote to stderr before code could."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    if process.returncode is None:
        # Popen.wait with a timeout sleeps and looks again, twice as long each time.
        ended = os.pidfd_open(process.pid)
        select.select([ended], [], [], END_TIMEOUT_S)
        os.close(ended)
    process.wait(0)
    said = process.stderr.read(MAX_STDERR) or b""
    process.stderr.close()
    return said.decode("utf-8", "replace").strip()


class Unsandboxed(Isolation):
    """No isolation whatever: the same processes with the same limits, and nothing that holds them."""

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
        return _Loose(process, directory)


class _Loose(Process):
    def __init__(self, process: subprocess.Popen[bytes], directory: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._directory = directory

    def enforce(self) -> None:
        """Nothing holds it."""

    def end(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        said = reap(self._process)
        self._directory.cleanup()
        return said
