"""Limits of all processes of a sandbox together, where the service may make control groups."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "rlhf-sandbox-"
LEAF = "rlhf-services"
"""Name of the group to which the processes of a version 2 group move, so that the group can have limited groups."""
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
REMOVE_TIMEOUT_S = 5.0

CPU_PERIOD_US = 100_000
"""Length of the periods for which controller "cpu" sets limits, in microseconds: the default of both versions."""
_FILES = {
    ("cgroup", "pids"): "pids.max",
    ("cgroup", "memory"): "memory.limit_in_bytes",
    ("cgroup", "cpu"): "cpu.cfs_quota_us",
    ("cgroup2", "pids"): "pids.max",
    ("cgroup2", "memory"): "memory.max",
    ("cgroup2", "cpu"): "cpu.max",
}
"""Files of limits by hierarchy and controller: processes and threads, bytes, and microseconds of CPU time in a period.
All groups have the default weight, so groups that compete for CPU time get equal shares."""
_NAMES = ("pids", "memory", "cpu")


@dataclass(frozen=True)
class Controller:
    """A usable controller.

    Attributes:
        name: "pids", "memory" or "cpu".
        parent: Directory in which groups are made.
        limit_file: Name of the file of a group that sets the limit.
    """

    name: str
    parent: Path
    limit_file: str


@dataclass
class ControlGroup:
    """The control groups of one sandbox, one directory per hierarchy. To be removed when its processes have ended."""

    directories: list[Path] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Moves a process into the group; processes that it starts afterwards are in the group too."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the directories. The kernel may take a moment to remove processes that have ended from the group.

        Raises:
            OSError: The group still has processes after `REMOVE_TIMEOUT_S`.
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


def usable(limits: dict[str, int]) -> list[Controller]:
    """The controllers in which this process can make a group with these limits; it tries each of them."""
    found = []
    for kind, name, parent in _candidates():
        controller = Controller(name, parent, _FILES[kind, name])
        try:
            make([controller], f"{PREFIX}{os.getpid()}-probe", limits).remove()
        except OSError:
            continue
        found.append(controller)
    return found


def make(controllers: list[Controller], name: str, limits: dict[str, int]) -> ControlGroup:
    """Makes a group with these limits by controller.

    Raises:
        OSError: The group cannot be made; its directories are removed.
    """
    group = ControlGroup()
    try:
        for controller in controllers:
            directory = controller.parent / name
            if directory not in group.directories:
                directory.mkdir()
                group.directories.append(directory)
            (directory / controller.limit_file).write_text(str(limits[controller.name]))
            # Version 2 limits memory and swap apart.
            if controller.limit_file == "memory.max" and (swap := directory / "memory.swap.max").exists():
                swap.write_text("0")
    except OSError:
        group.remove()
        raise
    return group


def sweep(controllers: list[Controller]) -> None:
    """Removes groups of killed services, whose processes have ended with them."""
    for parent in {controller.parent for controller in controllers}:
        for directory in parent.glob(f"{PREFIX}*"):
            pid = directory.name.removeprefix(PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                # Another service may sweep at the same time.
                with contextlib.suppress(OSError):
                    directory.rmdir()


def _make_room(own: Path) -> Path:
    """The version 2 group in which a process of group `own` can make groups with limits, as far as the host permits.

    A controller limits the child groups of a group once it is enabled there. A group other than the root can enable one
    only without processes of its own: so all its processes move to a leaf, under the same limits as before.
    """
    room = own.parent if own.name == LEAF else own
    processes, enabled = room / "cgroup.procs", room / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        wanted = set(_NAMES).intersection((room / "cgroup.controllers").read_text().split())
        missing = wanted.difference(enabled.read_text().split())
        if not missing or not (os.access(enabled, os.W_OK) and os.access(processes, os.W_OK)):
            return room
        if (room / "cgroup.type").exists():  # The root has none.
            (room / LEAF).mkdir(exist_ok=True)
            for pid in processes.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (room / LEAF / "cgroup.procs").write_text(pid)
        for name in sorted(missing):
            with contextlib.suppress(OSError):
                enabled.write_text(f"+{name}")
    return room


def _candidates() -> list[tuple[str, str, Path]]:
    """Hierarchy, controller, and the directory for our groups, of each controller that is mounted."""
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
        for name in _NAMES:
            if (kind, name) not in _FILES or (kind == "cgroup" and name not in names):
                continue
            path = own.get(name if kind == "cgroup" else "")
            if path is not None:
                group = Path(mount) / os.path.relpath(path, root)
                found.append((kind, name, _make_room(group) if kind == "cgroup2" else group))
    return found
