"""Sandboxes by bubblewrap: everything unshared, and limits of all processes of a sandbox together."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import py_compile
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from services.reward.sandbox import cgroups, confine, seccomp, usage
from services.reward.sandbox.isolation import (
    ENVIRONMENT,
    INTERPRETER,
    MIB,
    PACKAGE,
    SOURCE,
    Isolation,
    Process,
    SandboxFailed,
    job_file,
    limits,
    memory_file,
    python,
    reap,
)
from settings.reward import SandboxTable

LAUNCH_TIMEOUT_S = 60.0
HOME = "/sandbox"
"""Where our own modules lie in a sandbox."""
TMP = "/tmp"
PREFIX = Path(os.path.realpath(sys.base_prefix))
"""The Python installation."""
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
"""Where shared libraries lie, and nothing else of the host's."""
SHARED = ("wire", "confine")
ROLES = ("candidate", "test_runner")
FILES_PER_MIB = 256
"""Most files in /tmp: one for each page of 4 KiB that it may take."""
CPU_CHECK_S = 0.2
"""Least time between two looks at the CPU time of a sandbox's processes, each of which reads all of /proc."""


def missing() -> list[str]:
    """The things that the host lacks, with what helps; empty where a sandbox can be tried."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append(f"namespaces: {sys.platform} is not Linux")
    if shutil.which("bwrap") is None:
        lacks.append("bwrap is not on PATH: install bubblewrap")
    if not Path(INTERPRETER).is_relative_to(PREFIX):
        lacks.append(f"the interpreter {INTERPRETER} is not below {PREFIX}, all of Python that sandboxes see")
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
        # Looked for once, and not again in the PATH that sandboxes are given.
        self._bwrap = os.path.abspath(shutil.which("bwrap") or "")
        self._limits = limits(table)
        self._filter = seccomp.program()
        self._group_limits = {
            "pids": table.processes + 8,
            "memory": (table.memory_mb + table.tmpfs_mb) * MIB,
            "cpu": cgroups.CPU_PERIOD_US,
        }
        self._controllers = cgroups.usable(self._group_limits)
        self._numbers = itertools.count()  # taken by many threads
        self._as_root = os.geteuid() == 0
        self._tmpfs_bytes = table.tmpfs_mb * MIB
        one_core = any(controller.name == "cpu" for controller in self._controllers)
        self._quota = Quota(
            table.cpu_time_s, table.tmpfs_mb * FILES_PER_MIB, 1 if one_core else os.cpu_count() or 1
        )
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

    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int]) -> Process:
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                info, info_end = os.pipe()
                gate, gate_end = os.pipe()
                rules = memory_file(self._filter)
                stdin = job_file(job, self._limits, self._as_root, pass_fds)
                for fd in (info, gate_end):
                    ours.callback(os.close, fd)
                for fd in (info_end, gate, rules, stdin):
                    theirs.callback(os.close, fd)
                command = [*self._command(module, info_end, gate, rules), *python(module)]
                monitor = subprocess.Popen(
                    command, env={**ENVIRONMENT, "PYTHONPATH": HOME}, stdin=stdin, stdout=stdout,
                    stderr=subprocess.PIPE, pass_fds=[info_end, gate, rules, *pass_fds], start_new_session=True,
                    cwd="/",
                )  # fmt: skip
            return self._let_go(monitor, info, gate_end)

    def _let_go(self, monitor: subprocess.Popen[bytes], info: int, gate: int) -> Process:
        """While bwrap waits behind the gate: the map of users, and the control groups."""
        sandbox = _Sandboxed(monitor, self._quota)
        try:
            pid = _first_pid(info)
            sandbox.has_process(pid)
            if self._as_root:
                for kind in ("uid_map", "gid_map"):
                    ids = f"0 0 1\n{confine.UNPRIVILEGED_ID} {confine.UNPRIVILEGED_ID} 1\n"
                    Path(f"/proc/{pid}/{kind}").write_text(ids)
            name = f"{cgroups.PREFIX}{os.getpid()}-{next(self._numbers)}"
            sandbox.group = cgroups.make(self._controllers, name, self._group_limits)
            sandbox.group.add(pid)
            os.write(gate, b"\n")
        except BaseException as error:
            said = sandbox.end()
            if not isinstance(error, OSError | EOFError):
                raise
            raise SandboxFailed(
                f"bwrap did not start: {type(error).__name__}: {error} {said}".strip()
            ) from error
        return sandbox

    def _command(self, module: str, info: int, gate: int, rules: int) -> list[str]:
        if self._as_root:
            # The two capabilities serve to become the unprivileged user, and are gone with that.
            user = ["--userns-block-fd", str(gate), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--block-fd", str(gate), "--uid", str(confine.UNPRIVILEGED_ID)]
            user += ["--gid", str(confine.UNPRIVILEGED_ID)]
        return [
            self._bwrap, "--unshare-all", "--unshare-user", "--cap-drop", "ALL", *user,
            "--die-with-parent", "--new-session", "--hostname", "sandbox",
            "--info-fd", str(info), "--seccomp", str(rules),
            # First, for Python may lie below it.
            "--perms", "1777", "--size", str(self._tmpfs_bytes), "--tmpfs", TMP, *_mounts(module),
            # The root is a tmpfs without a size: nobody may write there.
            "--remount-ro", "/", "--chdir", TMP, "--",
        ]  # fmt: skip


def _mounts(module: str) -> list[str]:
    """Libraries, the interpreter, four devices and our modules. There is no /proc, no /sys and no /etc."""
    # bwrap gives the directories it makes on the way the modes of the host's, which may shut others out.
    found = [
        word
        for directory in (*[*reversed(PREFIX.parents)][1:], "/usr", "/dev", HOME)
        for word in ("--perms", "0755", "--dir", str(directory))
    ]
    for path in SYSTEM:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            found += ["--ro-bind", path, path]
    if Path("/usr") != PREFIX:
        found += ["--ro-bind", str(PREFIX), str(PREFIX)]
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


@dataclass(frozen=True)
class Quota:
    """Limits of all processes of a sandbox together.

    Attributes:
        cpu_time_s: CPU seconds.
        files: Files in /tmp.
        cores: The most that can run at the same time.
    """

    cpu_time_s: float
    files: int
    cores: int


class _Sandboxed(Process):
    """A sandbox that runs, or did not quite start.

    Killing the first process of its namespace makes the kernel kill all others, and bwrap, which is its parent,
    sees the end of it only when all are gone: nothing is left over, and nothing is orphaned.

    Attributes:
        group: Its control groups.
    """

    def __init__(self, monitor: subprocess.Popen[bytes], quota: Quota) -> None:
        self._monitor = monitor
        self._quota = quota
        self._next_check = time.monotonic() + quota.cpu_time_s / quota.cores
        self._first = 0
        self._pidfd = -1
        self.group = cgroups.ControlGroup()

    def has_process(self, first: int) -> None:
        """Names the first process of its namespace."""
        self._pidfd = os.pidfd_open(first)
        self._first = first

    def enforce(self) -> None:
        try:
            exceeded = usage.files(self._first, TMP) > self._quota.files or self._cpu_time_is_over()
        except (FileNotFoundError, ProcessLookupError):
            return  # it ends
        except OSError as error:
            if self._has_ended():
                return
            raise SandboxFailed(f"the files in a sandbox cannot be counted: {error}") from error
        if exceeded:
            self._kill()

    def _cpu_time_is_over(self) -> bool:
        """Looks only when it can have come to that."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        left = self._quota.cpu_time_s - usage.cpu_time_s(self._first)
        self._next_check = now + max(CPU_CHECK_S, left / self._quota.cores)
        # A child that ends meanwhile is counted twice: by itself and by its parent.
        return left < 0 and usage.cpu_time_s(self._first) > self._quota.cpu_time_s

    def _has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> str:
        if self._first:
            self._kill()
            os.close(self._pidfd)
        else:
            self._monitor.kill()
        said = reap(self._monitor)
        try:
            self.group.remove()
        except OSError as error:
            logging.warning("a control group of a program that has ended stays behind: %s", error)
        return said
