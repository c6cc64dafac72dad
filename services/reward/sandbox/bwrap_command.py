"""The command line of bwrap: namespaces, users and mounts of a sandbox, and its requirements on the host."""

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
"""Directory of our own modules in a sandbox."""
TMP = "/tmp"
PREFIX = Path(os.path.realpath(sys.base_prefix))
"""The Python installation."""
DEVICES = ("null", "zero", "random", "urandom")
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
"""Directories of shared libraries, the only ones of the host that sandboxes see."""
_SHARED = ("wire", "confine")
MODULES = {
    "candidate": (*_SHARED, "candidate"),
    "test_runner": (*_SHARED, "remote_program", "test_kinds", "test_runner"),
}
"""Our modules that a sandbox sees, by the module that it runs."""


def missing() -> list[str]:
    """The requirements that the host does not meet, each with a remedy; empty where a sandbox can be tried."""
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
    """Makes command lines of bwrap, each with an interpreter that runs `main` of one of our modules.

    As root, a user namespace has two users: root, which sets up the mounts, for only root may reach an interpreter in
    a home directory, and an unprivileged one, which runs all code. As any other user there is one user, without
    rights outside.
    """

    def __init__(self, table: SandboxTable, as_root: bool) -> None:
        # Looked up once, since sandboxes get another PATH.
        self._bwrap = os.path.abspath(shutil.which("bwrap") or "")
        self._as_root = as_root
        self._tmpfs_bytes = table.tmpfs_mb * MIB

    def line(self, module: str, info: int, gate: int, rules: int) -> list[str]:
        """The command line.

        Args:
            module: "candidate" or "test_runner".
            info: Descriptor to which bwrap writes the PID of the first process.
            gate: Descriptor from which bwrap reads a byte before it goes on.
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
    """Mounts of libraries, the interpreter, four devices and our modules. There is no /proc, no /sys and no /etc."""
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
