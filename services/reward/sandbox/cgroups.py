"""Limits on all processes of a sandbox together, by control groups, on hosts where the service may create them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "rlhf-sandbox-"
LEAF = "rlhf-services"
"""Name of the child group to which the processes of a version 2 group are moved, so that limits can be set on further
child groups."""
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
REMOVE_TIMEOUT_S = 5.0

CPU_PERIOD_US = 100_000
"""Period of the CPU time limit in microseconds; the default of both versions of control groups."""
_FILES = {
    ("cgroup", "pids"): "pids.max",
    ("cgroup", "memory"): "memory.limit_in_bytes",
    ("cgroup", "cpu"): "cpu.cfs_quota_us",
    ("cgroup2", "pids"): "pids.max",
    ("cgroup2", "memory"): "memory.max",
    ("cgroup2", "cpu"): "cpu.max",
}
"""Names of the files that set limits, by (file system type of the hierarchy, controller). Units: number of processes
and threads, bytes, and microseconds of CPU time per period. All groups have the default weight, so that groups that
compete for CPU time get equal shares."""
_NAMES = ("pids", "memory", "cpu")


@dataclass(frozen=True)
class Controller:
    """A controller of control groups that the service can use.

    Attributes:
        name: "pids", "memory" or "cpu".
        parent: Directory in which groups are created.
        limit_file: Name of the file, in a group's directory, that sets the limit.
    """

    name: str
    parent: Path
    limit_file: str


@dataclass
class ControlGroup:
    """The control groups of one sandbox, one directory per hierarchy. Call `remove` when its processes have ended."""

    directories: list[Path] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Moves a process into the groups; processes that it starts afterwards belong to them too."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the directories. Retries for up to REMOVE_TIMEOUT_S seconds, since the kernel may still count
        processes that have just ended.

        Raises:
            OSError: A group still has processes afterwards.
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
    """Returns the controllers in which this process can create a group with its limit; `limits` is by controller name.
    Tries each one; on version 2 it may move the processes of its own group to the child group `LEAF`."""
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
    """Creates the control groups of a sandbox.

    Args:
        controllers: Controllers to use, from `usable`.
        name: Name of the new directories.
        limits: Limit by name of the controller; see `_FILES` for units.

    Raises:
        OSError: A group cannot be created; its directories are removed.
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
    """Removes groups that killed services have left behind; their processes have ended with the services."""
    for parent in {controller.parent for controller in controllers}:
        for directory in parent.glob(f"{PREFIX}*"):
            pid = directory.name.removeprefix(PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                # Another service may sweep at the same time.
                with contextlib.suppress(OSError):
                    directory.rmdir()


def _make_room(own: Path) -> Path:
    """Prepares and returns the version 2 group in which a process of group `own` can create groups with limits, as
    far as the host permits.

    A controller limits the child groups of a group once it is enabled in the group. A group other than the root can
    enable controllers only while it has no processes itself, so all its processes are moved to the child group LEAF,
    where the same limits apply to them.
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
    """Returns (file system type, controller, directory in which to create groups) for each controller that is
    mounted."""
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
