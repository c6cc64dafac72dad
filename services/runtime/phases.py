"""The phase of one rank (idle, fetching, computing and so on), as WorkerService.Watch reports it."""

from __future__ import annotations

import asyncio

from rlhf.v1 import worker_pb2
from services.runtime.calls import ActiveCall


class RankPhase:
    """The phase of a rank and the call that it runs. Not thread-safe: used from the event loop alone.

    Attributes:
        phase: The phase, a `worker_pb2.Phase`; never changes again once it is PHASE_DRAINING.
        call: The call that the rank runs; None when idle.
        changed: Event that the next change of phase or call sets, and then replaces by a new, unset one.
    """

    def __init__(self) -> None:
        self.phase = worker_pb2.PHASE_IDLE
        self.call: ActiveCall | None = None
        self.changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the rank is shutting down: it lets the running call end and refuses all others."""
        return self.phase == worker_pb2.PHASE_DRAINING

    def set(self, phase: worker_pb2.Phase, call: ActiveCall | None) -> None:
        """Sets phase and call, and sets the event `changed`. Keeps PHASE_DRAINING, whatever `phase` is."""
        self.phase, self.call = worker_pb2.PHASE_DRAINING if self.is_draining else phase, call
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
