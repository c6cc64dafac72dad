"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Operation of prctl(2)."""


def ends_with(parent: int) -> bool:
    """Makes the kernel kill this process (SIGKILL) when the thread that started it ends, however it ends. Returns False
    if the parent, of PID `parent`, has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
