"""State machine of an NCCL transfer, which reader and source each run. Pure: uses no clock, thread or device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.errors import Refused


class Phase(enum.Enum):
    """State of a transfer, from IDLE to DONE or ABORTED."""

    IDLE = enum.auto()
    """The source has not yet accepted the manifest."""
    PREPARED = enum.auto()
    """The source has accepted the manifest and both sides have their buffers; neither has enqueued its NCCL group."""
    COMMITTED = enum.auto()
    """Both sides enqueue their NCCL group."""
    DONE = enum.auto()
    ABORTED = enum.auto()

    @property
    def over(self) -> bool:
        """Whether the transfer is DONE or ABORTED."""
        return self in (Phase.DONE, Phase.ABORTED)


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.PREPARED, Phase.ABORTED}),
    Phase.PREPARED: frozenset({Phase.COMMITTED, Phase.ABORTED}),
    Phase.COMMITTED: frozenset({Phase.DONE, Phase.ABORTED}),
    Phase.DONE: frozenset(),
    Phase.ABORTED: frozenset({Phase.ABORTED}),
}


@dataclass
class Transaction:
    """State of one transfer over one communicator: IDLE, then PREPARED, COMMITTED and DONE; ABORTED from any state
    but DONE. Aborting again has no effect. Every other transition raises Refused.

    Attributes:
        plan: Random id of the transfer, chosen by the reader.
        communicator_epoch: Number of the communicator. A failed transfer ends its communicator, so this number
            distinguishes late messages from those of the next transfer.
        phase: Current state. Default: IDLE.
        reason: Reason of the abort; empty unless aborted.
    """

    plan: str
    communicator_epoch: int
    phase: Phase = Phase.IDLE
    reason: str = ""

    def prepare(self) -> None:
        """Records that the source has accepted the manifest and that this side's buffer is allocated. Raises Refused
        unless the transfer is IDLE."""
        self._advance(Phase.PREPARED)

    def commit(self, plan: str, communicator_epoch: int) -> None:
        """Records that both sides enqueue their NCCL group.

        Raises:
            Refused: Another plan or communicator was prepared, or the transfer is not PREPARED.
        """
        if (plan, communicator_epoch) != (self.plan, self.communicator_epoch):
            raise Refused(
                f"plan {plan} of communicator {communicator_epoch} was not prepared; the prepared plan is {self}"
            )
        self._advance(Phase.COMMITTED)

    def finish(self) -> None:
        """Records that this side has received, or sent, every byte. Raises Refused unless it is COMMITTED."""
        self._advance(Phase.DONE)

    def abort(self, reason: str) -> None:
        """Records that the transfer was aborted; keeps the first reason if called again. Raises Refused if it is
        DONE."""
        self._advance(Phase.ABORTED)
        self.reason = self.reason or reason

    def __str__(self) -> str:
        return f"plan {self.plan} of communicator {self.communicator_epoch}"

    def _advance(self, phase: Phase) -> None:
        """Sets the state. Raises Refused where `phase` cannot follow the current one."""
        if phase not in _NEXT[self.phase]:
            cause = f": {self.reason}" if self.reason else ""
            raise Refused(
                f"{self} is {self.phase.name.lower()}{cause}; it cannot become {phase.name.lower()}"
            )
        self.phase = phase
