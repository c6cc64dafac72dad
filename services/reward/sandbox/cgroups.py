"""Limits of a whole sandbox rather than of each process in it, where the host lets us make control groups."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "rlhf-sandbox-"
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
REMOVE_TIMEOUT_S = 5.0

_FILES = {
    ("cgroup", "pids"): "pids.max",
    ("cgroup", "memory"): "memory.limit_in_bytes",
    ("cgroup2", "pids"): "pids.max",
    ("cgroup2", "memory"): "memory.max",
}


@dataclass(frozen=True)
class Controller:
    """A controller we may use.

    Attributes:
        name: "pids" or "memory".
        parent: Directory in which groups are made: the one this process is in.
        limit_file: The file of a group that takes the limit.
    """

    name: str
    parent: Path
    limit_file: str


@dataclass
class Group:
    """The control groups of one sandbox: one directory per hierarchy. Remove it when its processes are gone."""

    directories: list[Path] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Moves a process into it; what that process starts from then on is in it too."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the directories; the kernel may take a moment to let go of processes that have ended.

        Raises:
            OSError: There are still processes in it.
        """
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        for directory in self.directories:
            while True:
                try:
                    directory.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)


def usable() -> list[Controller]:
    """The controllers in which this process may make groups and set limits; found by trying."""
    found = []
    for kind, name, parent in _candidates():
        controller = Controller(name, parent, _FILES[kind, name])
        try:
            make([controller], f"{PREFIX}{os.getpid()}-probe", {name: 1 << 20}).remove()
        except OSError:
            continue
        found.append(controller)
    return found


def make(controllers: list[Controller], name: str, limits: dict[str, int]) -> Group:
    """A new group with these limits by controller.

    Raises:
        OSError: It cannot be made; nothing is left of it.
    """
    group = Group()
    try:
        for controller in controllers:
            directory = controller.parent / name
            if directory not in group.directories:
                directory.mkdir()
                group.directories.append(directory)
            (directory / controller.limit_file).write_text(str(limits[controller.name]))
    except OSError:
        group.remove()
        raise
    return group


def sweep(controllers: list[Controller]) -> None:
    """Removes groups of services that were killed; their processes died with them."""
    for parent in {controller.parent for controller in controllers}:
        for directory in parent.glob(f"{PREFIX}*"):
            pid = directory.name.removeprefix(PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                # Another service may be sweeping too.
                with contextlib.suppress(OSError):
                    directory.rmdir()


def _candidates() -> list[tuple[str, str, Path]]:
    """Hierarchy, controller, and the directory of our own group in it."""
    own = {}
    for line in OWN.read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    found = []
    for line in MOUNTS.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, mount = fields.split(" ")[3:5]
        names = options.split(" ")[-1].split(",") if kind == "cgroup" else [""]
        for name in ("pids", "memory"):
            if (kind, name) not in _FILES or (kind == "cgroup" and name not in names):
                continue
            path = own.get(name if kind == "cgroup" else "")
            if path is not None:
                found.append((kind, name, Path(mount) / os.path.relpath(path, root)))
    return found
