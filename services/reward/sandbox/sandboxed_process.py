"""A running sandbox of bwrap: enforces limits on all its processes together, and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass

from services.reward.sandbox import cgroups, usage
from services.reward.sandbox.bwrap_command import TMP
from services.reward.sandbox.isolation import Process, SandboxFailed, is_readable, reap

CPU_CHECK_S = 0.2
"""Minimum seconds between two measurements of the CPU time of a sandbox, each of which reads all of /proc."""


@dataclass(frozen=True)
class Quota:
    """Limits on all processes of a sandbox together.

    Attributes:
        cpu_time_s: Maximum CPU time in seconds.
        files: Maximum number of files in /tmp.
        cores: Number of cores that the processes can use at the same time, which bounds how fast CPU time is used.
    """

    cpu_time_s: float
    files: int
    cores: int


class SandboxedProcess(Process):
    """A sandbox of bwrap that is running or starting.

    When the first process of its PID namespace is killed, the kernel kills all others. bwrap is the parent of the
    first process and ends after all of them, so no process is left behind.

    Args:
        monitor: Process of bwrap.
        quota: Limits on all processes of the sandbox together.

    Attributes:
        group: Control groups of the sandbox; empty until the caller sets them.
    """

    def __init__(self, monitor: subprocess.Popen[bytes], quota: Quota) -> None:
        self._monitor = monitor
        self._quota = quota
        self._next_check = time.monotonic() + quota.cpu_time_s / quota.cores
        self._first = 0
        self._pidfd = -1
        self.group = cgroups.ControlGroup()

    def set_first_process(self, pid: int) -> None:
        """Sets the PID, on the host, of the first process of the sandbox; to be called once bwrap has reported it."""
        self._pidfd = os.pidfd_open(pid)
        self._first = pid

    def enforce(self) -> None:
        try:
            exceeded = usage.files(self._first, TMP) > self._quota.files or self._cpu_time_is_over()
        except (FileNotFoundError, ProcessLookupError):
            return  # The sandbox is ending.
        except OSError as error:
            if is_readable(self._pidfd, 0.0):
                return
            raise SandboxFailed(f"the files in a sandbox cannot be counted: {error}") from error
        if exceeded:
            self._kill()

    def _cpu_time_is_over(self) -> bool:
        """Returns whether the CPU time is used up. Measures it only if enough time has passed since the last
        measurement for that to be possible."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        left = self._quota.cpu_time_s - usage.cpu_time_s(self._first)
        self._next_check = now + max(CPU_CHECK_S, left / self._quota.cores)
        # A child that ends during the measurement is counted twice, by itself and by its parent, so measure again.
        return left < 0 and usage.cpu_time_s(self._first) > self._quota.cpu_time_s

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> str:
        try:
            if self._first:
                self._kill()
                os.close(self._pidfd)
            else:
                self._monitor.kill()
            return reap(self._monitor)
        finally:
            try:
                self.group.remove()
            except OSError as error:
                logging.warning("a control group of a program that has ended stays behind: %s", error)
