"""Threads, descriptors and memory of the ranks of a service, before and after random calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from chaos.targets import FREE_WITHIN_S, Target
from held import Held

from integration.harness import wait_until

GROWTH = 64 << 20
"""Most bytes by which resident memory of a rank may grow during random calls."""

OF_A_PEER = Held(fds=8, memfds=2, memfd_mappings=1, threads=4)
"""Most that a rank keeps from its first read of another rank of its service on: a connection, and its arena."""


@dataclass(frozen=True)
class Usage:
    """Of a rank: threads and descriptors, and resident bytes."""

    held: Held
    rss: int

    @staticmethod
    def of(target: Target) -> list[Usage]:
        return [Usage(Held.by(each.pid), each.memory_info().rss) for each in target.processes]


def with_peers(held: Held, peers: int) -> Held:
    """Returns what a rank may hold once it has read from so many peers."""
    counts = ("fds", "memfds", "memfd_mappings", "threads")
    return Held(**{name: getattr(held, name) + peers * getattr(OF_A_PEER, name) for name in counts})


def check_growth(target: Target, before: list[Usage]) -> None:
    """Checks that no rank has grown, once connections that were closed have gone. A rank may be told to read its own
    rows over a connection too."""
    allowed = [with_peers(old.held, len(target.ranks)) for old in before]
    with contextlib.suppress(AssertionError):
        wait_until(
            lambda: all(new.held <= most for new, most in zip(Usage.of(target), allowed, strict=True)),
            FREE_WITHIN_S,
            "threads and descriptors as before",
        )
    for old, new, most in zip(before, Usage.of(target), allowed, strict=True):
        print(f"{target.name}: {old} -> {new}", flush=True)
        opened = Counter(new.held.open) - Counter(old.held.open)
        assert new.held <= most, f"{target.name}: {old.held} -> {new.held}; new: {opened}"
        assert new.rss - old.rss < GROWTH, target.name
