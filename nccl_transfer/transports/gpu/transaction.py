"""State machine of a two-sided transfer, used by both sides. Pure: no clock, thread or device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.errors import Refused


class Phase(enum.Enum):
    """State of a transfer."""

    IDLE = enum.auto()
    """The manifest is not acknowledged yet."""
    PREPARED = enum.auto()
    """Both sides have the manifest and their buffers; neither has entered the group."""
    COMMITTED = enum.auto()
    """Both sides enter the group."""
    DONE = enum.auto()
    ABORTED = enum.auto()

    @property
    def over(self) -> bool:
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
    """One transfer of one plan over one communicator: IDLE, PREPARED, COMMITTED, DONE; ABORTED from any state but DONE.
    Aborting again has no effect.

    Attributes:
        plan: Name of the plan.
        communicator_epoch: Number of its communicator. A failed transfer ends the communicator, so this number
            distinguishes late messages from those of the next transfer.
        phase: Current state.
        reason: Reason of the abort; empty before.
    """

    plan: str
    communicator_epoch: int
    phase: Phase = Phase.IDLE
    reason: str = ""

    def prepare(self) -> None:
        """Records that the manifest is acknowledged and buffers are allocated."""
        self._advance(Phase.PREPARED)

    def commit(self, plan: str, communicator_epoch: int) -> None:
        """Records that both sides enter the group.

        Raises:
            Refused: Another plan or communicator was prepared, or the transfer is not PREPARED.
        """
        if (plan, communicator_epoch) != (self.plan, self.communicator_epoch):
            raise Refused(
                f"plan {plan} of communicator {communicator_epoch} is not what was prepared: that is {self}"
            )
        self._advance(Phase.COMMITTED)

    def finish(self) -> None:
        """Records that every byte has arrived, or has been sent."""
        self._advance(Phase.DONE)

    def abort(self, reason: str) -> None:
        """Records that the transfer is given up; keeps the first reason."""
        self._advance(Phase.ABORTED)
        self.reason = self.reason or reason

    def __str__(self) -> str:
        return f"plan {self.plan} of communicator {self.communicator_epoch}"

    def _advance(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            cause = f": {self.reason}" if self.reason else ""
            raise Refused(
                f"{self} is {self.phase.name.lower()}{cause}; it cannot become {phase.name.lower()}"
            )
        self.phase = phase
