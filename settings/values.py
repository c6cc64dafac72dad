"""Settings of a values service, which computes values with weights that it receives from a critic."""

from __future__ import annotations

from typing import Literal

from settings.frozen import FrozenTable


class ValuesTable(FrozenTable):
    """Settings of a values service, whose ranks compute values with the weights of a critic, which `sync_weights` moves
    there. Of the model directory it reads config and tokenizer alone."""

    role: Literal["values"]
    """Always values."""
    weights_of: str = "critic"
    """Name of the service of role critic whose weights these are, and whose values this service computes."""
