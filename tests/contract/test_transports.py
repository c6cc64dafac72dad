"""The transports of this project pass the contract that plug-ins pass."""

from __future__ import annotations

from contract.own_transports import OwnTransports


class TestTransports(OwnTransports):
    """All of them, read from the same peers."""
