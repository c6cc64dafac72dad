"""Resources that all processes of a sandbox use together, read from /proc outside the sandbox."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_PARENT, _TIMES = 1, slice(11, 15)
"""Indices of fields of /proc/PID/stat, counted after the name of the process (proc(5)): PID of the parent; clock
ticks in user and in kernel mode, of the process and of the children that it has waited for."""


def cpu_time_s(first: int) -> float:
    """Returns the CPU seconds that a process, its PID `first`, and all its descendants have used, ended ones
    included.

    The kernel adds the time of a process that ends to the parent that waits for it. A parent that ignores SIGCHLD would
    lose that time; the seccomp filter prevents it.
    """
    children: dict[int, list[int]] = defaultdict(list)
    ticks = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = stat.rpartition(b")")[2].split()
        children[int(fields[_PARENT])].append(int(name))
        ticks[int(name)] = sum(map(int, fields[_TIMES]))
    total, found = 0, [first]
    while found:
        pid = found.pop()
        total += ticks.get(pid, 0)
        found += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def files(first: int, directory: str) -> int:
    """Returns the number of files, directories and links in a file system of a sandbox, including files without a
    name, such as deleted ones that a process still has open.

    Args:
        first: PID of a process in the sandbox.
        directory: Mount point of the file system in the sandbox.

    Raises:
        FileNotFoundError, ProcessLookupError: The process has ended.
        OSError: The service may not look into the sandbox.
    """
    found = os.statvfs(f"/proc/{first}/root{directory}")
    return found.f_files - found.f_ffree
