"""A service that a supervisor has started: its processes, and how a lost one is started again."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy import processes
from deploy.health import Probe
from deploy.peers import PeerWatch
from rlhf.rendezvous import LocalRendezvous
from settings.restarts import LONGEST_PAUSE_S, pause_before
from settings.service import ServiceTable


@dataclass
class StartedService:
    """A started service.

    Attributes:
        ranks: Its ranks on this host.
        processes: Their processes, in order.
        rendezvous: Where they meet; None for ranks on several hosts.
        peers: Watch of the ranks on other hosts; None where there are none.
        started: Time of its last start, in seconds of `time.monotonic`.
        healthy: Whether it has been healthy since.
        restart: Its restart that is under way; None where its ranks run.
        log_bytes: Size of its log at its last start.
    """

    name: str
    table: ServiceTable
    ranks: range
    processes: list[subprocess.Popen[bytes]]
    rendezvous: LocalRendezvous | None
    peers: PeerWatch | None
    probe: Probe
    log: Path
    started: float = field(default_factory=time.monotonic)
    healthy: bool = False
    healthy_since: float = 0.0
    restart: Restart | None = None
    log_bytes: int = 0
    _was_healthy: bool = False
    _losses: int = 0
    _failed_starts: int = 0

    def note_health(self) -> None:
        """Records that it is healthy now, for the first time since its start."""
        self.healthy = self._was_healthy = True
        self.healthy_since, self._failed_starts = time.monotonic(), 0

    def exit_codes(self) -> dict[int, int]:
        """Returns the exit codes of the ranks on this host that have ended, by rank."""
        codes = {rank: process.poll() for rank, process in zip(self.ranks, self.processes, strict=True)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def living(self) -> list[psutil.Process]:
        """Returns the processes of the ranks on this host that have not ended."""
        return [psutil.Process(process.pid) for process in self.processes if process.poll() is None]

    def may_restart(self) -> bool:
        """Whether it is started again where it is lost: its table allows it, all its ranks are on this host, it was
        healthy once, and has not ended `restarts` times in a row before it was healthy."""
        return self.peers is None and self._was_healthy and self._failed_starts < self.table.allowed_restarts

    def begin_restart(self, deployment: str, grace_s: float) -> None:
        """Tells its processes that are left to end, with which its restart begins. The first restart follows at once,
        further ones after 1 s, 2 s, and so on, unless it was healthy for longer than `LONGEST_PAUSE_S` before.

        Args:
            deployment: Id of the deployment.
            grace_s: Time, in seconds, before they are killed.
        """
        now = time.monotonic()
        if not self.healthy:
            self._failed_starts += 1
        elif now - self.healthy_since > LONGEST_PAUSE_S:
            self._losses = 0
        self._losses, self.healthy = self._losses + 1, False
        pause_s = pause_before(self._losses)
        ending = processes.end(deployment, grace_s, self.living(), service=self.name)
        self.restart = Restart(ending, now + pause_s)

    def close(self) -> None:
        """Closes its rendezvous and its channels; its processes must have ended."""
        if self.rendezvous:
            self.rendezvous.close()
        if self.peers:
            self.peers.close()
        self.probe.close()


@dataclass(frozen=True)
class Restart:
    """The restart of a service.

    Attributes:
        ending: Its processes that were left.
        due: Earliest time of the start, in seconds of `time.monotonic`.
    """

    ending: processes.Ending
    due: float

    def is_due(self) -> bool:
        """Whether the service may be started now; does not block. Raises RlhfError where a process of it outlives
        SIGKILL."""
        return self.ending.is_over() and time.monotonic() >= self.due
