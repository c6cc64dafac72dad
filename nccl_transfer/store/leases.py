"""Lifetime of shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """Lifetime of a shard: a step of a controller's session. The shard is freed when the step or the session is
    released."""

    session: str
    step: int
