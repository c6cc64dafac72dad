"""Which weights a rank that receives them computes with, and which wait to replace them."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.errors import Refused


@dataclass(frozen=True)
class Version:
    """Weights that have come by a transfer.

    Attributes:
        transfer: Id of the transfer.
        policy_version: Their policy version.
        state_id: Id of the source's state (Outcome.state_id) that they are of; empty if not known.
    """

    transfer: str
    policy_version: int
    state_id: str = ""


class Versions:
    """The states that the weights of a rank go through: a transfer begins, all of its weights have arrived, it is
    committed. A transfer that fails leaves no version behind.

    With a second buffer the rank serves the version from before until the commit. Without, it serves none from the
    beginning of a transfer to its commit, and none after one that has failed.

    Args:
        second_buffer: Whether weights arrive beside those that are served.

    Attributes:
        served: The version to compute with; None if there is none, or no whole one.
        arrived: The version that a commit makes the served one; None if there is none.
    """

    def __init__(self, *, second_buffer: bool) -> None:
        self._second_buffer = second_buffer
        self.served: Version | None = None
        self.arrived: Version | None = None

    def begin(self) -> None:
        """Notes that the first weights of a transfer are about to be written. Those of an earlier one that has arrived
        and was not committed are lost."""
        self.arrived = None
        if not self._second_buffer:
            self.served = None

    def complete(self, version: Version) -> None:
        """Notes that all weights of a version are there."""
        self.arrived = version

    def check_commit(self, transfer: str) -> None:
        """Raises Refused unless the weights of this transfer are those that have arrived, or, if none wait, those that
        are served."""
        last = self.arrived or self.served
        if last is None or last.transfer != transfer:
            has = f"transfer {self.arrived.transfer!r} has" if self.arrived else "none has"
            raise Refused(
                f"transfer {transfer!r} cannot be committed: of the last LoadWeights calls {has} arrived"
            )

    def commit(self) -> None:
        """Makes the version that has arrived, if there is one, the one that is served."""
        self.served, self.arrived = self.arrived or self.served, None

    def clear(self) -> None:
        """Forgets all versions: the memory of the weights has no values to compute with."""
        self.served = self.arrived = None
