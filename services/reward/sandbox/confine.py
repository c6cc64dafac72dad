"""The first code that a process in a sandbox runs: it gives up its rights, before it reads any untrusted data.

This module runs in both sandboxes; see wire.py for the modules that may be imported here.
"""

from __future__ import annotations

import os
import resource

from services.reward.sandbox import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

UNPRIVILEGED_ID = 65534
"""User id and group id of all code in a sandbox."""
OPEN_FILES = 64
MOST_DESCRIPTORS = 1 << 20


def begin() -> dict[str, Any]:
    """Confines this process: reads the job from standard input, closes inherited descriptors, drops root, and sets
    limits that cannot be raised again.

    Returns:
        The job, a dictionary. This function uses its keys "keep" (descriptors besides 0, 1 and 2 that stay open),
        "drop_root" (whether to become UNPRIVILEGED_ID) and "limits" (by name in the module `resource`).
    """
    with open(0, "rb", closefd=False) as stdin:
        job = wire.decode(stdin.read())
    first = 3
    for kept in sorted(job["keep"]):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, MOST_DESCRIPTORS)
    if job["drop_root"]:
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    for name, value in job["limits"].items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (allowed, allowed))
    return job


def silence(*fds: int) -> None:
    """Redirects descriptors to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)
