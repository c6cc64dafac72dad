"""Threads, descriptors and memory of the ranks of a service, before and after random calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chaos.targets import FREE_WITHIN_S, Target

from integration.harness import wait_until
from nccl_transfer.testing.held import Held

GROWTH = 64 << 20
"""Most bytes by which resident memory of a rank may grow during random calls."""


@dataclass(frozen=True)
class Usage:
    """Of a rank: threads and descriptors, and resident bytes."""

    held: Held
    rss: int

    @staticmethod
    def of(target: Target) -> list[Usage]:
        return [Usage(Held.by(each.pid), each.memory_info().rss) for each in target.processes]


def growth(target: Target, before: list[Usage], within_s: float = FREE_WITHIN_S) -> str:
    """Waits up to `within_s` seconds until connections that were closed have gone; returns what the ranks hold more
    than before, as text, and "" if nothing. Asserts that their memory has not grown by GROWTH."""
    with contextlib.suppress(AssertionError):
        wait_until(
            lambda: all(new.held <= old.held for new, old in zip(Usage.of(target), before, strict=True)),
            within_s,
            "threads and descriptors as before",
        )
    more = []
    for old, new in zip(before, Usage.of(target), strict=True):
        print(f"{target.name}: {old} -> {new}", flush=True)
        assert new.rss - old.rss < GROWTH, target.name
        if not new.held <= old.held:
            opened = Counter(new.held.open) - Counter(old.held.open)
            named = [f"{name} {connection(name)}".strip() for name in opened.elements()]
            more.append(f"{target.name}: {old.held} -> {new.held}; new: {named}")
    return "; ".join(more)


def connection(name: str) -> str:
    """Row of the kernel's tables (addresses in hexadecimal, state) of a socket of this network namespace, whose
    descriptor has this name; empty for other descriptors."""
    inode = name.removeprefix("socket:[").removesuffix("]")
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if inode in words:
                return " ".join([table, *(words[1:4] if table != "unix" else words[5:])])
    return ""
