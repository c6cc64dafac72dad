"""The state of one rank, for Watch."""

from __future__ import annotations

import asyncio

from rlhf.v1 import worker_pb2
from services.runtime.calls import ActiveCall


class RankPhase:
    """The phase of a rank, and the call that it is in. Used from the event loop.

    Attributes:
        phase: The phase; PHASE_DRAINING from `drain` on.
        call: The call in turn; None when idle.
        changed: Set at the next change, and then replaced by an event of its own for the one after.
    """

    def __init__(self) -> None:
        self.phase = worker_pb2.PHASE_IDLE
        self.call: ActiveCall | None = None
        self.changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the rank finishes its last call."""
        return self.phase == worker_pb2.PHASE_DRAINING

    def set(self, phase: worker_pb2.Phase, call: ActiveCall | None) -> None:
        """Notes a change."""
        self.phase, self.call = worker_pb2.PHASE_DRAINING if self.is_draining else phase, call
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
