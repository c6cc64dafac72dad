"""The command line of bwrap: namespaces, users and mounts of a sandbox; and the requirements on the host."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from rlhf.errors import ConfigError
from services.reward.sandbox import confine, seccomp
from services.reward.sandbox.isolation import INTERPRETER, MIB, PACKAGE, SOURCE, python
from settings.reward import SandboxTable

HOME = "/sandbox"
"""Directory of this package's modules in a sandbox."""
TMP = "/tmp"
PREFIX = Path(os.path.realpath(sys.base_prefix))
"""Directory of the Python installation on the host, without symbolic links."""
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
"""Directories of shared libraries, the only ones of the host's system that a sandbox contains."""
_SHARED = ("wire", "confine")
MODULES = {
    "candidate": (*_SHARED, "candidate"),
    "test_runner": (*_SHARED, "remote_program", "test_kinds", "test_runner"),
}
"""Modules of this package that a sandbox contains, by the module that it runs."""


def missing() -> list[str]:
    """Returns one text, with a remedy, per requirement that the host does not meet; empty if sandboxes can be
    tried."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append(f"namespaces: {sys.platform} is not Linux")
    if shutil.which("bwrap") is None:
        lacks.append("bwrap is not on PATH: install bubblewrap")
    if not Path(INTERPRETER).is_relative_to(PREFIX):
        lacks.append(f"the interpreter {INTERPRETER} is not below {PREFIX}, all of Python that sandboxes see")
    try:
        seccomp.program()
    except ConfigError as error:
        lacks.append(str(error))
    return lacks


class BwrapCommand:
    """Builds command lines of bwrap that run `main` of a module of this package in a Python interpreter.

    If the service runs as root, the user namespace has two users: root, which sets up the mounts, since only root may
    reach an interpreter in a home directory, and an unprivileged user, which runs all code. Otherwise it has one
    user, without rights outside.

    Args:
        table: The table `sandbox` of the config.
        as_root: Whether the service runs as root.
    """

    def __init__(self, table: SandboxTable, as_root: bool) -> None:
        # Looked up once, since sandboxes get another PATH.
        self._bwrap = os.path.abspath(shutil.which("bwrap") or "")
        self._as_root = as_root
        self._tmpfs_bytes = table.tmpfs_mb * MIB

    def line(self, module: str, info: int, gate: int, rules: int) -> list[str]:
        """Returns the command line, as a list of arguments.

        Args:
            module: Module to run, "candidate" or "test_runner".
            info: Descriptor to which bwrap writes the PID of the sandbox's first process.
            gate: Descriptor from which bwrap reads a byte before it starts the interpreter.
            rules: Descriptor of the seccomp filter.
        """
        if self._as_root:
            # The two capabilities serve to become the unprivileged user, and are gone with that.
            user = ["--userns-block-fd", str(gate), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--block-fd", str(gate), "--uid", str(confine.UNPRIVILEGED_ID)]
            user += ["--gid", str(confine.UNPRIVILEGED_ID)]
        return [
            self._bwrap, "--unshare-all", "--unshare-user", "--cap-drop", "ALL", *user,
            "--die-with-parent", "--new-session", "--hostname", "sandbox",
            "--info-fd", str(info), "--seccomp", str(rules),
            # First, for Python may lie below it.
            "--perms", "1777", "--size", str(self._tmpfs_bytes), "--tmpfs", TMP, *_mounts(module),
            # The root is a tmpfs without a size: no user may write there.
            "--remount-ro", "/", "--chdir", TMP, "--", *python(module),
        ]  # fmt: skip


def _mounts(module: str) -> list[str]:
    """Returns the arguments that mount libraries, the interpreter, four devices and the modules that `module` needs.
    A sandbox has no /proc, /sys or /etc."""
    # bwrap gives the directories that it makes on the way the modes of the host's, which may shut other users out.
    found = [
        word
        for directory in (*[*reversed(PREFIX.parents)][1:], "/usr", "/dev", HOME)
        for word in ("--perms", "0755", "--dir", str(directory))
    ]
    for path in SYSTEM:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            found += ["--ro-bind", path, path]
    if Path("/usr") != PREFIX:
        found += ["--ro-bind", str(PREFIX), str(PREFIX)]
    else:
        found += ["--ro-bind", "/usr/bin", "/usr/bin"]
    for device in DEVICES:
        found += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for name in MODULES[module]:
        source = str(SOURCE / f"{name}.py")
        compiled = importlib.util.cache_from_source(source)
        found += ["--ro-bind", source, f"{HOME}/{PACKAGE}/{name}.py"]
        found += ["--ro-bind-try", compiled, f"{HOME}/{PACKAGE}/__pycache__/{Path(compiled).name}"]
    return found
