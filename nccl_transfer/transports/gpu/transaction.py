"""A two-sided transfer, step by step, as both of its sides keep book of it. Pure: no clock, no thread, no device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.errors import Refused


class Phase(enum.Enum):
    """How far a transfer has come."""

    IDLE = enum.auto()
    """The manifest is not acknowledged yet."""
    PREPARED = enum.auto()
    """Both sides know the manifest and have their buffers; nobody has entered."""
    COMMITTED = enum.auto()
    """Both sides are told to enter the group."""
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
    """One transfer of one plan over one communicator: IDLE, PREPARED, COMMITTED, DONE; ABORTED from anywhere but
    DONE, and as often as one likes.

    Attributes:
        plan: Name of the plan.
        communicator_epoch: The communicator it belongs to. A failed transfer ends the communicator, so whatever
            still arrives for it is told apart from the next transfer by this number.
        phase: How far it has come.
        reason: Why it was aborted.
    """

    plan: str
    communicator_epoch: int
    phase: Phase = Phase.IDLE
    reason: str = ""

    def prepare(self) -> None:
        """The manifest is acknowledged and buffers are there."""
        self._advance(Phase.PREPARED)

    def commit(self, plan: str, communicator_epoch: int) -> None:
        """Both sides enter.

        Raises:
            Refused: Another plan or communicator was prepared, or it is not the time.
        """
        if (plan, communicator_epoch) != (self.plan, self.communicator_epoch):
            raise Refused(
                f"plan {plan} of communicator {communicator_epoch} is not what was prepared: that is {self}"
            )
        self._advance(Phase.COMMITTED)

    def finish(self) -> None:
        """Every byte has arrived, or has been sent."""
        self._advance(Phase.DONE)

    def abort(self, reason: str) -> None:
        """It will not happen. The first reason counts."""
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
