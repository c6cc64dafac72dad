"""Prints the stacks of the ranks of a deployment on this host: asks each by a signal, and reads its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from deploy import state
from deploy.processes import POLL_S
from deploy.state import Deployment
from rlhf.errors import RlhfError
from rlhf.stacks import SIGNAL

ANSWER_S = 5.0
"""Longest time, in seconds, to wait for the stacks of a rank."""
QUIET_S = 0.5
"""Time, in seconds, without a further line after which the stacks of a rank are complete."""


@dataclass(frozen=True)
class RunningRank:
    """A rank of a deployment on this host.

    Attributes:
        service: Name of its service.
        rank: Its number.
        process: Its process.
    """

    service: str
    rank: int
    process: psutil.Process


def running_ranks(deployment: Deployment) -> list[RunningRank]:
    """Returns the ranks that the supervisor of a deployment has started, by service and number. Raises RlhfError where
    the supervisor has ended."""
    supervisor = state.supervisor(deployment)
    if supervisor is None:
        raise RlhfError(f"{deployment.config}: its supervisor, pid {deployment.supervisor}, has ended")
    found = [rank for child in supervisor.children() if (rank := _rank(child))]
    return sorted(found, key=lambda each: (each.service, each.rank))


def print_stacks(deployment: Deployment, ranks: list[RunningRank], say: Callable[[str], None]) -> None:
    """Makes ranks print the stacks of their threads and tasks into their logs, one after another, and says what each
    has printed. A rank that has not begun to load its model, which the signal would end, is left alone."""
    for each in ranks:
        log = Path(deployment.log_dir) / f"{each.service}.log"
        title = f"{each.service} rank {each.rank}, pid {each.process.pid}"
        try:
            if not _catches_signal(each.process.pid):
                say(f"{title}: is starting or ending, and prints no stacks")
                continue
            before = log.stat().st_size
            each.process.send_signal(SIGNAL)
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            say(f"{title}: has ended; log {log}")
            continue
        printed = "".join(_added(log, before))
        if printed:
            say(f"{title}, in {log}:\n{printed}")
        else:
            say(
                f"{title}: printed nothing within {ANSWER_S:g} s, in state {_status(each.process)}; log {log}"
            )


def _added(log: Path, before: int) -> Iterator[str]:
    """Yields what is added to a log after its first `before` bytes, until nothing is for `QUIET_S` or after
    `ANSWER_S`."""
    begun = changed = time.monotonic()
    with log.open("rb") as file:
        file.seek(before)
        is_answered = False
        while time.monotonic() < begun + ANSWER_S:
            if text := file.read().decode(errors="replace"):
                is_answered, changed = True, time.monotonic()
                yield text
            elif is_answered and time.monotonic() > changed + QUIET_S:
                return
            time.sleep(POLL_S)


def _rank(process: psutil.Process) -> RunningRank | None:
    """Returns the rank that a child of the supervisor is; None for one that has ended."""
    try:
        command, number = process.cmdline(), process.environ().get("RANK", "0")
    except psutil.Error:
        return None
    names = [value for key, value in pairwise(command) if key == "--name"]
    return RunningRank(names[0], int(number), process) if names else None


def _catches_signal(pid: int) -> bool:
    """Returns whether a process has a handler of the signal; the signal ends one without."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.Error:
        return "ended"
