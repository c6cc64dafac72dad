"""Finds the processes of a deployment by a mark in their environment, and stops them.

Every process that a deployment starts inherits the mark. So all processes are found even if their launcher or parent
has ended, and a recycled process id is never mistaken for one of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

from rlhf.errors import RlhfError

MARK = "RLHF_DEPLOYMENT"
"""Environment variable that holds the id of the deployment a process belongs to."""
POLL_S = 0.1
"""Interval, in seconds, at which processes that are waited for are polled."""
KILL_TIMEOUT_S = 10.0
"""Longest time, in seconds, to wait for a process to end after SIGKILL."""


def find(deployment: str, started: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Returns the living processes of the deployment with this id, by process id: those whose environment has the id
    in the variable `MARK`, those of `started`, and the descendants of both. The list is empty where none is left.

    Args:
        deployment: The id.
        started: Processes that the caller has started for the deployment. Their environment may not be readable, since
            a process may overwrite it, as setproctitle does.
    """
    own = _own(deployment, started)
    found = set(own)
    for root in _roots(own):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(child for child in root.children(recursive=True) if is_alive(child))
    return sorted(found, key=lambda process: process.pid)


def stop(deployment: str, grace_s: float, started: Iterable[psutil.Process] = ()) -> None:
    """Ends all processes of the deployment with this id; blocks until they are gone.

    The topmost processes get SIGTERM at the same time and pass it on to their children; those that are left after the
    grace are killed.

    Args:
        deployment: The id.
        grace_s: Time in seconds before SIGKILL.
        started: As for `find`.

    Raises:
        RlhfError: A killed process does not end: it is stuck in the kernel.
    """
    started = list(started)
    seen = set(find(deployment, started))
    for root in _roots(_own(deployment, started)):
        with contextlib.suppress(psutil.NoSuchProcess):
            root.terminate()

    def living() -> list[psutil.Process]:
        # An unmarked process is found through its ancestors only, so it is remembered when they end first.
        seen.update(find(deployment, started))
        return [process for process in seen if is_alive(process)]

    kill_after(grace_s, living)


def kill_after(grace_s: float, living: Callable[[], list[psutil.Process]]) -> None:
    """Blocks until `living` returns no process; sends SIGKILL to those that are left after `grace_s` seconds.

    Args:
        grace_s: Time in seconds before SIGKILL.
        living: Function that returns the processes that are still alive.

    Raises:
        RlhfError: A killed process does not end: it is stuck in the kernel.
    """
    grace_ends = time.monotonic() + grace_s
    while left := living():
        now = time.monotonic()
        if now > grace_ends + KILL_TIMEOUT_S:
            raise RlhfError(f"processes outlive SIGKILL: {', '.join(str(process.pid) for process in left)}")
        if now > grace_ends:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(POLL_S)


def _own(deployment: str, started: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the living processes that have the mark of a deployment, or are among `started`."""
    marked = {process for process in psutil.process_iter() if _mark(process) == deployment}
    return [*marked, *(process for process in started if process not in marked and is_alive(process))]


def is_marked(process: psutil.Process) -> bool:
    """Returns whether a process belongs to any deployment; False also if its environment cannot be read."""
    return _mark(process) is not None


def _mark(process: psutil.Process) -> str | None:
    # A process that is gone, is a zombie or belongs to another user has no environment to be read.
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK)
    return None


def _roots(own: list[psutil.Process]) -> list[psutil.Process]:
    """Returns those of some processes whose parent is not among them."""
    pids = {process.pid for process in own}
    return [process for process in own if _parent(process) not in pids]


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; False also for one that its parent has not waited for yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
