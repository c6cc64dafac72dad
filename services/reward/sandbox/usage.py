"""The resources that all processes of a sandbox have used together, seen from outside by /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_PARENT, _TIMES = 1, slice(11, 15)
"""Fields of /proc/PID/stat behind the name of the process: its parent; clock ticks of the process in user and in
kernel mode, and of the children that it has waited for. See proc(5)."""


def cpu_time_s(first: int) -> float:
    """CPU seconds of a process and all its descendants, of those too that have ended.

    The time of a process that ends goes to the one that waits for it; the seccomp filter keeps programs from ignoring
    SIGCHLD, with which it would be lost.
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
    """Files, directories and links in a file system of a sandbox, those without a name included.

    Args:
        first: A process in the sandbox.
        directory: Where the file system is mounted there.

    Raises:
        FileNotFoundError, ProcessLookupError: The process has ended.
        OSError: They cannot be seen from here.
    """
    found = os.statvfs(f"/proc/{first}/root{directory}")
    return found.f_files - found.f_ffree
