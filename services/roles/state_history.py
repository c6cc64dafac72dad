"""The id of a model's state: a chain of hashes over all that has changed the state, which every rank of a service
computes alike without asking the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.errors import InvalidRequest, OutOfStep

MAX_STATE_ID = 64
"""Most characters of a state id."""


class StateHistory:
    """Names the state of a model.

    Args:
        start: Text that no other start of any service has.
    """

    def __init__(self, start: str) -> None:
        self._id, self._version = _digest(start), 0

    @contextmanager
    def lost_if_out_of_step(self) -> Iterator[None]:
        """Context manager of a call: if it raises OutOfStep, the state has no id any more. The process exits soon, but
        answers until then, and may have changed a part of its state."""
        try:
            yield
        except OutOfStep:
            self._id = ""
            raise

    def id_at(self, policy_version: int) -> str:
        """Returns the id of the present state, in hexadecimal; empty after OutOfStep, and where the policy version is
        not the one that was noted last, since a role of another package may change its weights without a note."""
        return self._id if policy_version == self._version else ""

    def changed(self, call_id: str, policy_version: int) -> None:
        """Notes that a call with this id, which no other call has, has changed the state to this policy version."""
        self._id, self._version = _digest(self._id, call_id), policy_version

    def loaded(self, state_id: str, call_id: str, policy_version: int) -> None:
        """Notes that a call has loaded the state that had the id `state_id` when it was saved; a new one where that is
        empty."""
        self.changed(call_id, policy_version)
        self._id = state_id or self._id


def check_state_id(state_id: str) -> None:
    """Raises InvalidRequest if the id of a request has more than MAX_STATE_ID characters."""
    if len(state_id) > MAX_STATE_ID:
        raise InvalidRequest(f"state_id has {len(state_id)} characters; at most {MAX_STATE_ID} are allowed")


def _digest(*parts: str) -> str:
    """Returns 128 bits, in hexadecimal, of the sha256 of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
