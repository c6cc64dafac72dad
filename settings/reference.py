"""Settings of the reference policy."""

from __future__ import annotations

from typing import Literal

from settings.frozen import FrozenTable


class ReferenceTable(FrozenTable):
    """Settings of the reference policy: a frozen model that a KL penalty keeps the actor close to."""

    role: Literal["reference"]
    """Always reference."""
