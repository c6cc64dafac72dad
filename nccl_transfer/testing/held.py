"""System resources of a process, for tests that nothing is left behind."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

THREADS_OF_GRPC = ("event_engine", "grpc_global_tim", "lifeguard", "resolver-execut", "default-executo")
"""gRPC keeps a pool of threads, one for all its channels, that grows and shrinks with the load."""
OF_GRPC = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
"""Descriptors that they wait on. Our own threads wait on the same, and are counted themselves."""


@dataclass(frozen=True)
class Held:
    """Open descriptors, descriptors of arenas, mapped arenas and threads; those of gRPC's own pool apart."""

    fds: int
    memfds: int
    memfd_mappings: int
    threads: int
    open: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Targets of the descriptors."""

    @staticmethod
    def by(pid: int) -> Held:
        process = Path("/proc") / str(pid)
        targets = [_target(fd) for fd in (process / "fd").iterdir()]
        maps = (process / "maps").read_text().splitlines()
        return Held(
            sum(target not in OF_GRPC for target in targets),
            sum("memfd:rlhf-arena" in target for target in targets),
            sum("memfd:rlhf-arena" in line for line in maps),
            sum(_name(task) not in THREADS_OF_GRPC for task in (process / "task").iterdir()),
            tuple(targets),
        )

    @staticmethod
    def here() -> Held:
        gc.collect()
        return Held.by(os.getpid())

    def __le__(self, other: Held) -> bool:
        counts = ("fds", "memfds", "memfd_mappings", "threads")
        return all(getattr(self, name) <= getattr(other, name) for name in counts)


def assert_no_more_than(before: Held, within_s: float = 5.0) -> None:
    """Asserts that within `within_s` seconds this process holds no more resources than `before`."""
    deadline = time.monotonic() + within_s
    while not (now := Held.here()) <= before:
        new = [*(Counter(now.open) - Counter(before.open)).elements()]
        assert time.monotonic() < deadline, f"{now} after {before}; new: {new}"
        time.sleep(0.01)


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return ""
