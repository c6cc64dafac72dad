"""Versions of the weights of a receiving rank: the served version, and the version that awaits its commit."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.errors import Refused


@dataclass(frozen=True)
class Version:
    """Weights that a transfer has delivered.

    Attributes:
        transfer: Id of the transfer.
        policy_version: Their policy version.
        state_id: Id of the source's state (Outcome.state_id); empty if unknown.
    """

    transfer: str
    policy_version: int
    state_id: str = ""


class Versions:
    """State machine of the weights of a rank: a transfer begins, all its weights arrive, it is committed. A failed
    transfer leaves no version.

    With a second buffer, the rank serves the previous version until the commit. Without it, the rank serves no version
    from the beginning of a transfer until its commit, and none after a failed transfer.

    Args:
        second_buffer: Whether weights are received into a second buffer.

    Attributes:
        served: The version to compute with; None if there is no complete version.
        arrived: The version that a commit makes the served one; None if there is none.
    """

    def __init__(self, *, second_buffer: bool) -> None:
        self._second_buffer = second_buffer
        self.served: Version | None = None
        self.arrived: Version | None = None

    def begin(self) -> None:
        """Notes that the first weights of a transfer are about to be written. Discards an earlier version that was not
        committed."""
        self.arrived = None
        if not self._second_buffer:
            self.served = None

    def complete(self, version: Version) -> None:
        """Notes that all weights of a version have arrived."""
        self.arrived = version

    def check_commit(self, transfer: str) -> None:
        """Raises Refused unless the arrived version, or the served version if none awaits its commit, is of this
        transfer."""
        last = self.arrived or self.served
        if last is None or last.transfer != transfer:
            waiting = (
                f"the weights of transfer {self.arrived.transfer!r}"
                if self.arrived
                else "no complete weights"
            )
            raise Refused(f"transfer {transfer!r} cannot be committed: {waiting} await a commit")

    def commit(self) -> None:
        """Makes the version that has arrived, if there is one, the one that is served."""
        self.served, self.arrived = self.arrived or self.served, None

    def clear(self) -> None:
        """Removes all versions: the memory of the weights holds no complete version."""
        self.served = self.arrived = None
