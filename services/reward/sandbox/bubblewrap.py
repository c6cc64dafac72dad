"""Sandboxes by bubblewrap: each has its own namespaces, and limits on all its processes together."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import py_compile
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from services.reward.sandbox import cgroups, confine, seccomp
from services.reward.sandbox.bwrap_command import HOME, MODULES, BwrapCommand, missing
from services.reward.sandbox.isolation import (
    ENVIRONMENT,
    MIB,
    SOURCE,
    Isolation,
    Process,
    SandboxFailed,
    is_readable,
    job_file,
    limits,
    memory_file,
)
from services.reward.sandbox.sandboxed_process import Quota, SandboxedProcess
from settings.reward import SandboxTable

LAUNCH_TIMEOUT_S = 60.0
FILES_PER_MIB = 256
"""Maximum number of files in /tmp per MiB of its size: one per page of 4 KiB."""

_numbers = itertools.count()
"""Numbers of the sandboxes of this process, in the names of their control groups; taken by many threads."""


class Bubblewrap(Isolation):
    """Starts processes in sandboxes of bubblewrap (the command bwrap).

    Args:
        table: The table `sandbox` of the config.

    Raises:
        ConfigError: The host does not meet a requirement.
    """

    def __init__(self, table: SandboxTable) -> None:
        if lacks := missing():
            raise ConfigError("; ".join(lacks))
        self._as_root = os.geteuid() == 0
        self._command = BwrapCommand(table, self._as_root)
        self._limits = limits(table)
        self._filter = seccomp.program()
        self._group_limits = {
            "pids": table.processes + 8,
            "memory": (table.memory_mb + table.tmpfs_mb) * MIB,
            "cpu": cgroups.CPU_PERIOD_US,
        }
        self._controllers = cgroups.usable(self._group_limits)
        one_core = any(controller.name == "cpu" for controller in self._controllers)
        self._quota = Quota(
            table.cpu_time_s, table.tmpfs_mb * FILES_PER_MIB, 1 if one_core else os.cpu_count() or 1
        )
        cgroups.sweep(self._controllers)
        for name in {name for names in MODULES.values() for name in names}:
            # Compiling them anew in each sandbox costs a third of its start.
            with contextlib.suppress(OSError):
                py_compile.compile(str(SOURCE / f"{name}.py"))

    def describe(self) -> str:
        """Returns one line for the log: the mechanisms that isolate programs on this host."""
        groups = " and ".join(controller.name for controller in self._controllers) or "none usable"
        user = "an unprivileged user" if self._as_root else "this user, without rights"
        return f"bubblewrap, all namespaces, {user}, seccomp; control groups: {groups}"

    def start(self, module: str, job: dict[str, Any], stdout: int, pass_fds: Sequence[int]) -> Process:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            info, info_end = os.pipe()
            ours.callback(os.close, info)
            theirs.callback(os.close, info_end)
            gate, gate_end = os.pipe()
            ours.callback(os.close, gate_end)
            theirs.callback(os.close, gate)
            rules = memory_file(self._filter)
            theirs.callback(os.close, rules)
            stdin = job_file(job, self._limits, self._as_root, pass_fds)
            theirs.callback(os.close, stdin)
            monitor = subprocess.Popen(
                self._command.line(module, info_end, gate, rules),
                env={**ENVIRONMENT, "PYTHONPATH": HOME}, stdin=stdin, stdout=stdout,
                stderr=subprocess.PIPE, pass_fds=[info_end, gate, rules, *pass_fds], start_new_session=True,
                cwd="/",
            )  # fmt: skip
            theirs.close()
            return self._open_gate(monitor, info, gate_end)

    def _open_gate(self, monitor: subprocess.Popen[bytes], info: int, gate: int) -> Process:
        """Maps user ids and creates the control groups while bwrap waits, then lets it start the sandbox's program.

        Args:
            monitor: Process of bwrap.
            info: Descriptor from which the PID of the sandbox's first process is read.
            gate: Descriptor to which a byte is written for bwrap to go on.

        Raises:
            SandboxFailed: bwrap did not start.
        """
        sandbox = SandboxedProcess(monitor, self._quota)
        try:
            pid = _first_pid(info)
            sandbox.set_first_process(pid)
            if self._as_root:
                for kind in ("uid_map", "gid_map"):
                    ids = f"0 0 1\n{confine.UNPRIVILEGED_ID} {confine.UNPRIVILEGED_ID} 1\n"
                    Path(f"/proc/{pid}/{kind}").write_text(ids)
            name = f"{cgroups.PREFIX}{os.getpid()}-{next(_numbers)}"
            sandbox.group = cgroups.make(self._controllers, name, self._group_limits)
            sandbox.group.add(pid)
            os.write(gate, b"\n")
        except BaseException as error:
            monitor.kill()  # until the gate is open, it does not notice that the first process has ended
            said = sandbox.end()
            if not isinstance(error, OSError | EOFError):
                raise
            raise SandboxFailed(
                f"bwrap did not start: {type(error).__name__}: {error} {said}".strip()
            ) from error
        return sandbox


def _first_pid(info: int) -> int:
    """Waits for the PID of the first process in the new namespaces, which bwrap writes to the descriptor `info`.

    Raises:
        TimeoutError: bwrap did not report it within LAUNCH_TIMEOUT_S.
        EOFError: bwrap has ended.
    """
    deadline = time.monotonic() + LAUNCH_TIMEOUT_S
    said = b""
    while b"}" not in said:
        if not is_readable(info, max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"no sandbox within {LAUNCH_TIMEOUT_S:g} s")
        part = os.read(info, 4096)
        if not part:
            raise EOFError("bwrap ended")
        said += part
    return int(json.loads(said)["child-pid"])
