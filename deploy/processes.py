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
SERVICE_MARK = "RLHF_DEPLOYED_SERVICE"
"""Environment variable that holds the name of its service."""
POLL_S = 0.1
"""Interval, in seconds, at which processes that are waited for are polled."""
KILL_TIMEOUT_S = 10.0
"""Longest time, in seconds, to wait for a process to end after SIGKILL."""


def find(deployment: str, started: Iterable[psutil.Process] = (), service: str = "") -> list[psutil.Process]:
    """Returns the living processes of the deployment with this id, by process id: those whose environment has the id
    in the variable `MARK`, those of `started`, and the descendants of both. The list is empty where none is left.

    Args:
        deployment: The id.
        service: Name of a service: only processes whose environment has it in `SERVICE_MARK` too. Default: all.
        started: Processes that the caller has started for the deployment. Their environment may not be readable, since
            a process may overwrite it, as setproctitle does.
    """
    own = _own(deployment, started, service)
    found = set(own)
    for root in _roots(own):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(child for child in root.children(recursive=True) if is_alive(child))
    return sorted(found, key=lambda process: process.pid)


def stop(deployment: str, grace_s: float, started: Iterable[psutil.Process] = ()) -> None:
    """Ends all processes of the deployment with this id as `end` does; blocks until they are gone. Raises RlhfError
    where a killed process does not end: it is stuck in the kernel."""
    _wait_for(end(deployment, grace_s, started))


def end(deployment: str, grace_s: float, started: Iterable[psutil.Process] = (), service: str = "") -> Ending:
    """Tells all processes of the deployment with this id to end; does not block.

    The topmost processes get SIGTERM at the same time and pass it on to their children; those that are left after the
    grace are killed by `Ending.is_over`.

    Args:
        deployment: The id.
        grace_s: Time in seconds before SIGKILL.
        started, service: As for `find`.
    """
    started = list(started)
    seen = set(find(deployment, started, service))
    for root in _roots(_own(deployment, started, service)):
        with contextlib.suppress(psutil.NoSuchProcess):
            root.terminate()

    def living() -> list[psutil.Process]:
        # An unmarked process is found through its ancestors only, so it is remembered when they end first.
        seen.update(find(deployment, started, service))
        return [process for process in seen if is_alive(process)]

    return Ending(grace_s, living)


def kill_after(grace_s: float, living: Callable[[], list[psutil.Process]]) -> None:
    """Blocks until `living` returns no process; sends SIGKILL to those that are left after `grace_s` seconds.

    Args:
        grace_s: Time in seconds before SIGKILL.
        living: Function that returns the processes that are still alive.

    Raises:
        RlhfError: A killed process does not end: it is stuck in the kernel.
    """
    _wait_for(Ending(grace_s, living))


class Ending:
    """Processes that were told to end.

    Args:
        grace_s: Time in seconds from now before SIGKILL.
        living: Function that returns those that are still alive.
    """

    def __init__(self, grace_s: float, living: Callable[[], list[psutil.Process]]) -> None:
        self._living, self._grace_ends = living, time.monotonic() + grace_s

    def is_over(self) -> bool:
        """Returns, without blocking, whether all have ended. After the grace, sends SIGKILL to those that are left;
        `KILL_TIMEOUT_S` later, raises RlhfError where some have not ended."""
        left, now = self._living(), time.monotonic()
        if left and now > self._grace_ends + KILL_TIMEOUT_S:
            raise RlhfError(f"processes outlive SIGKILL: {', '.join(str(process.pid) for process in left)}")
        if now > self._grace_ends:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return not left


def _wait_for(ending: Ending) -> None:
    while not ending.is_over():
        time.sleep(POLL_S)


def _own(deployment: str, started: Iterable[psutil.Process], service: str = "") -> list[psutil.Process]:
    """Returns the living processes that have the mark of a deployment, and of a service if one is named, or are among
    `started`."""
    marked = {
        process
        for process in psutil.process_iter()
        if _mark(process) == deployment and service in ("", _mark(process, SERVICE_MARK))
    }
    return [*marked, *(process for process in started if process not in marked and is_alive(process))]


def is_marked(process: psutil.Process) -> bool:
    """Returns whether a process belongs to any deployment; False also if its environment cannot be read."""
    return _mark(process) is not None


def _mark(process: psutil.Process, variable: str = MARK) -> str | None:
    # A process that is gone, is a zombie or belongs to another user has no environment to be read.
    with contextlib.suppress(psutil.Error):
        return process.environ().get(variable)
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
