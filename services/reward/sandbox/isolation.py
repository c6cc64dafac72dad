"""How a process is put into a sandbox: bubblewrap with everything unshared, and what the host must have for it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import py_compile
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.config import SandboxTable
from rlhf.errors import ConfigError, RlhfError
from services.reward.sandbox import cgroups, confine, seccomp

LAUNCH_TIMEOUT_S = 20.0
MIB = 1 << 20
HOME = "/sandbox"
"""Where our own modules lie in a sandbox."""
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of the address space that is limited
    "PATH": "/usr/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program has the same verdict
}
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
"""Where shared libraries lie, and nothing else of the host's."""
SHARED = ("wire", "confine")
ROLES = ("candidate", "judge")
SOURCE = Path(__file__).parent
PACKAGE = "services/reward/sandbox"
MAX_STDERR = 2000


class SandboxFailed(RlhfError):
    """A sandbox did not start, which is no program's fault."""


class Process(ABC):
    """A process that may run anything, and can be ended with all that it started."""

    @abstractmethod
    def end(self) -> str:
        """Kills it and everything in its sandbox, waits until all of it is gone, and returns what stderr says."""


class Isolation(ABC):
    """A way to start processes."""

    @abstractmethod
    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int] = ()) -> Process:
        """Starts `main` of one of our modules.

        Args:
            module: "candidate" or "judge".
            job: What it reads on standard input; limits are added.
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


def missing() -> list[str]:
    """What the host lacks, with what helps; empty where a sandbox can be tried."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append(f"namespaces: {sys.platform} is not Linux")
    if shutil.which("bwrap") is None:
        lacks.append("bwrap is not on PATH: install bubblewrap")
    try:
        seccomp.program()
    except ConfigError as error:
        lacks.append(str(error))
    return lacks


class Bubblewrap(Isolation):
    """Sandboxes by bubblewrap.

    As root, a user namespace is made of two users: root, which sets up the mounts, for only it may reach an
    interpreter in a home directory, and an unprivileged one, which all code becomes. As anybody else there is only
    one user, which has no rights outside.

    Raises:
        ConfigError: Something is missing.
    """

    def __init__(self, table: SandboxTable) -> None:
        if lacks := missing():
            raise ConfigError("; ".join(lacks))
        self._limits = limits(table)
        self._filter = seccomp.program()
        self._controllers = cgroups.usable()
        self._group_limits = {"pids": table.processes + 8, "memory": (table.memory_mb + table.tmpfs_mb) * MIB}
        self._numbers = itertools.count()  # taken by many threads
        self._as_root = os.geteuid() == 0
        self._tmpfs_bytes = table.tmpfs_mb * MIB
        cgroups.sweep(self._controllers)
        for name in (*SHARED, *ROLES):
            # Compiling them anew in each sandbox costs a third of its start.
            with contextlib.suppress(OSError):
                py_compile.compile(str(SOURCE / f"{name}.py"))

    def describe(self) -> str:
        """One line on what holds programs, for the log."""
        groups = " and ".join(controller.name for controller in self._controllers) or "none usable"
        user = "an unprivileged user" if self._as_root else "this user, without rights"
        return f"bubblewrap, all namespaces, {user}, seccomp; control groups: {groups}"

    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int] = ()) -> Process:
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                info, info_end = os.pipe()
                gate, gate_end = os.pipe()
                rules = _memory_file(self._filter)
                stdin = _memory_file(_job(job, self._limits, drop_root=self._as_root))
                for fd in (info, gate_end):
                    ours.callback(os.close, fd)
                for fd in (info_end, gate, rules, stdin):
                    theirs.callback(os.close, fd)
                command = [
                    *self._bwrap(module, info_end, gate, rules),
                    *_python(sys._base_executable, module),  # type: ignore[attr-defined]
                ]
                monitor = subprocess.Popen(
                    command, env={**ENVIRONMENT, "PYTHONPATH": HOME}, stdin=stdin, stdout=stdout,
                    stderr=subprocess.PIPE, pass_fds=[info_end, gate, rules, *pass_fds], start_new_session=True,
                    cwd="/",
                )  # fmt: skip
            return self._let_go(monitor, info, gate_end)

    def _let_go(self, monitor: subprocess.Popen[bytes], info: int, gate: int) -> Process:
        """While bwrap waits behind the gate: the map of users, and the control groups."""
        group = cgroups.Group()
        pidfd = None
        try:
            pid = _first_pid(info)
            pidfd = os.pidfd_open(pid)
            if self._as_root:
                for kind in ("uid_map", "gid_map"):
                    ids = f"0 0 1\n{confine.UNPRIVILEGED_ID} {confine.UNPRIVILEGED_ID} 1\n"
                    Path(f"/proc/{pid}/{kind}").write_text(ids)
            name = f"{cgroups.PREFIX}{os.getpid()}-{next(self._numbers)}"
            group = cgroups.make(self._controllers, name, self._group_limits)
            group.add(pid)
            os.write(gate, b"\n")
        except BaseException as error:
            said = _Sandboxed(monitor, pidfd, group).end()
            if not isinstance(error, OSError | EOFError):
                raise
            raise SandboxFailed(
                f"bwrap did not start: {type(error).__name__}: {error} {said}".strip()
            ) from error
        return _Sandboxed(monitor, pidfd, group)

    def _bwrap(self, module: str, info: int, gate: int, rules: int) -> list[str]:
        if self._as_root:
            # The two capabilities serve to become the unprivileged user, and are gone with that.
            user = ["--userns-block-fd", str(gate), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--block-fd", str(gate), "--uid", str(confine.UNPRIVILEGED_ID)]
            user += ["--gid", str(confine.UNPRIVILEGED_ID)]
        return [
            "bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", *user,
            "--die-with-parent", "--new-session", "--hostname", "sandbox",
            "--info-fd", str(info), "--seccomp", str(rules),
            *_mounts(module),
            "--perms", "1777", "--size", str(self._tmpfs_bytes), "--tmpfs", "/tmp",
            # The root is a tmpfs without a size: nobody may write there.
            "--remount-ro", "/", "--chdir", "/tmp", "--",
        ]  # fmt: skip


def _mounts(module: str) -> list[str]:
    """Libraries, the interpreter, four devices and our modules. There is no /proc, no /sys and no /etc."""
    prefix = Path(sys.base_prefix)
    # bwrap gives the directories it makes on the way the modes of the host's, which may shut others out.
    found = [
        word
        for directory in (*[*reversed(prefix.parents)][1:], "/usr", "/dev", HOME)
        for word in ("--perms", "0755", "--dir", str(directory))
    ]
    for path in SYSTEM:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            found += ["--ro-bind", path, path]
    if prefix != Path("/usr"):
        found += ["--ro-bind", str(prefix), str(prefix)]
    else:
        found += ["--ro-bind", "/usr/bin", "/usr/bin"]
    for device in DEVICES:
        found += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for name in (*SHARED, module):
        source = str(SOURCE / f"{name}.py")
        compiled = importlib.util.cache_from_source(source)
        found += ["--ro-bind", source, f"{HOME}/{PACKAGE}/{name}.py"]
        found += ["--ro-bind-try", compiled, f"{HOME}/{PACKAGE}/__pycache__/{Path(compiled).name}"]
    return found


def _python(interpreter: str, module: str) -> list[str]:
    package = PACKAGE.replace("/", ".")
    return [os.path.realpath(interpreter), "-sSB", "-c", f"from {package}.{module} import main; main()"]


def _job(job: dict[str, Any], limits: dict[str, int], drop_root: bool) -> bytes:
    return json.dumps({**job, "limits": limits, "drop_root": drop_root}).encode()


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _first_pid(info: int) -> int:
    """The process that is number 1 in the new namespace, as bwrap names it once it has been made."""
    deadline = time.monotonic() + LAUNCH_TIMEOUT_S
    said = b""
    while b"}" not in said:
        ready, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no sandbox within {LAUNCH_TIMEOUT_S:g} s")
        part = os.read(info, 4096)
        if not part:
            raise EOFError("bwrap ended")
        said += part
    return int(json.loads(said)["child-pid"])


class _Sandboxed(Process):
    """A sandbox that runs, or did not quite start.

    Killing the first process of its namespace makes the kernel kill all others, and bwrap, which is its parent,
    sees the end of it only when all are gone: nothing is left over, and nothing is orphaned.
    """

    def __init__(self, monitor: subprocess.Popen[bytes], pidfd: int | None, group: cgroups.Group) -> None:
        self._monitor = monitor
        self._pidfd = pidfd
        self._group = group

    def end(self) -> str:
        if self._pidfd is None:
            self._monitor.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
        said = _end(self._monitor)
        self._group.remove()
        return said


class Unsandboxed(Isolation):
    """No isolation whatever: the same processes with the same limits, and nothing that holds them."""

    def __init__(self, table: SandboxTable) -> None:
        self._limits = limits(table)
        # Counted over all processes of the user, so it would stop the service itself.
        del self._limits["RLIMIT_NPROC"]

    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int] = ()) -> Process:
        stdin = _memory_file(_job(job, self._limits, drop_root=False))
        try:
            directory = tempfile.TemporaryDirectory(prefix="rlhf-unsandboxed-")
            process = subprocess.Popen(
                _python(sys._base_executable, module),  # type: ignore[attr-defined]
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

    def end(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        said = _end(self._process)
        self._directory.cleanup()
        return said


def _end(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a process that was killed; what it wrote to stderr before code could."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    process.wait(LAUNCH_TIMEOUT_S)
    said = process.stderr.read(MAX_STDERR) or b""
    process.stderr.close()
    return said.decode("utf-8", "replace").strip()
