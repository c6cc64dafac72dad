"""Identity of this process's host."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Returns an id that is equal in processes that can share memory. It consists of the boot id of the machine, the
    network namespace (which abstract sockets belong to), and the user (arenas are shared with the same user only). It
    is computed once: each read in place compares it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.geteuid()}"
