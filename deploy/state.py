"""Deployments of this host: one small file per config and name of the host, which its supervisor locks.

The kernel frees the lock when the supervisor ends, however it ends. So a locked file names a living supervisor, and an
unlocked one was left by a supervisor that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from deploy import processes
from rlhf.errors import Refused

LOCK_TIMEOUT_S = 1.0
"""Longest time, in seconds, to wait for the lock, which other commands hold briefly to read the file."""


@dataclass(frozen=True)
class Deployment:
    """One execution of `rlhf-deploy up` for a config."""

    config: str
    """Resolved path of the config."""
    log_dir: str
    """Directory of the logs."""
    settings: tuple[str, ...] = ()
    """Overrides "key.path=value" that it was started with."""
    host: str = ""
    """Name of this host in the config, where it has several; else empty."""
    supervisor: int = field(default_factory=os.getpid)
    """Process id of the supervisor."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique id, which its processes have in their environment; see `processes.MARK`."""


@contextlib.contextmanager
def claim(deployment: Deployment, grace_s: float) -> Iterator[None]:
    """Context manager that locks the config for a deployment and writes the deployment to the config's file. On
    entering, it stops processes that a killed supervisor of the same config left; on leaving, it removes the file
    unless processes of the deployment are still alive.

    Raises:
        Refused: The config is up already, or another deployment writes its logs to the same directory.
        RlhfError: A process that was left outlives SIGKILL.
    """
    path = _path(deployment)
    with _locked(path) as file:
        if left := _parse(file.read()):
            processes.stop(left.id, grace_s)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(asdict(deployment)))
        file.flush()
        try:
            _check_log_directory(deployment, path)
            yield
        finally:
            # Not a file that another deployment has made since this one's was removed.
            if not processes.find(deployment.id) and _is_at(file, path):
                path.unlink()


def _check_log_directory(deployment: Deployment, path: Path) -> None:
    """Raises Refused if another deployment that is up writes its logs to the same directory. Called once the file of
    the deployment, `path`, is written, so that of two that start at the same time at most one starts."""
    for other in _directory().glob("*.json"):
        up = _read(other) if other != path and _is_locked(other) else None
        if up and up.log_dir == deployment.log_dir:
            raise Refused(
                f"{deployment.log_dir}: {up.config} (supervisor pid {up.supervisor}) writes its logs there; choose "
                "another directory with --log-dir"
            )


def find(config: Path, host: str | None = None) -> Deployment | None:
    """Returns the deployment of a config that is up, or was left by a killed supervisor; None where there is none.

    Args:
        config: Path of the config.
        host: Name of the host in the config that it was started for. Default: whichever it is.

    Raises:
        Refused: The config is up for several hosts, and `host` is None.
    """
    resolved = os.path.realpath(config)  # Path.resolve raises in a loop of links
    found = [
        deployment
        for path in sorted(_directory().glob(f"{_key(resolved)}*.json"))
        if (deployment := _read(path)) and host in (None, deployment.host)
    ]
    if len(found) > 1:
        raise Refused(
            f"{config} is up for hosts {', '.join(each.host or '(all)' for each in found)}; name one by --host"
        )
    return found[0] if found else None


def supervisor(deployment: Deployment) -> psutil.Process | None:
    """Returns the process of a deployment's supervisor; None where it is not alive."""
    try:
        process = psutil.Process(deployment.supervisor)
    except psutil.NoSuchProcess:
        return None
    # Looked up before the look at the lock: its holder is the process that has this id now.
    return process if _is_locked(_path(deployment)) else None


def stop(deployment: Deployment, grace_s: float) -> bool:
    """Stops the supervisor and every process of a deployment, blocks until they are gone, and removes its file;
    returns whether the supervisor was alive. The supervisor gets SIGTERM, and SIGKILL `KILL_TIMEOUT_S` seconds after
    the grace; other processes that are left then get SIGTERM, and SIGKILL after the grace of `grace_s` seconds.

    Raises:
        RlhfError: A process outlives SIGKILL.
    """
    living = supervisor(deployment)
    if living:
        with contextlib.suppress(psutil.NoSuchProcess):
            living.terminate()
        processes.kill_after(
            grace_s + processes.KILL_TIMEOUT_S,
            # It gives up its lock before its process ends.
            lambda: [living] if processes.is_alive(living) else [],
        )
    processes.stop(deployment.id, grace_s)
    # Not where a new supervisor has the config already.
    with contextlib.suppress(Refused), _locked(path := _path(deployment)):
        path.unlink()
    return living is not None


def _path(deployment: Deployment) -> Path:
    host = f"-{_key(deployment.host)}" if deployment.host else ""
    return _directory() / f"{_key(deployment.config)}{host}.json"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> Deployment | None:
    try:
        return _parse(path.read_text())
    except FileNotFoundError:
        return None


def _directory() -> Path:
    """Returns the directory of the files of this user's deployments, which it makes where there is none. Every user can
    write to its parent, so another one may have made it first.

    Raises:
        Refused: It is no directory, such as a symbolic link, or another user owns it or can read or write it.
    """
    directory = Path(tempfile.gettempdir()) / f"rlhf-deploy-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    owner = f"owner: {_user_name(found.st_uid)}"
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{directory} ({owner}) has to be a directory, and no symbolic link; remove it")
    if found.st_uid != os.getuid():
        raise Refused(f"{directory} ({owner}) belongs to another user; have it removed, or set TMPDIR")
    if found.st_mode & 0o077:
        raise Refused(
            f"{directory} ({owner}) has mode {stat.S_IMODE(found.st_mode):o}, so that others than its owner can use "
            "it; it must be 700: remove it, or run chmod 700 where nobody else has written to it"
        )
    return directory


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _parse(text: str) -> Deployment | None:
    """Returns the deployment of a file's text; None for the empty text of a file that has just been made, and for one
    whose supervisor was killed while it wrote it, which is before it starts anything."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return Deployment(**{**values, "settings": tuple(values["settings"])})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            if _try_lock(file, fcntl.LOCK_EX) and _is_at(file, path):
                yield file
                return
            if time.monotonic() > deadline:
                holder = _parse(file.read())
                raise Refused(_already_up(holder) if holder else f"{path} is locked by another rlhf-deploy")
        time.sleep(processes.POLL_S)


def _already_up(holder: Deployment) -> str:
    host = f" --host {holder.host}" if holder.host else ""
    return (
        f"{holder.config} is up already (supervisor pid {holder.supervisor}, logs in {holder.log_dir}); "
        f"stop it first: rlhf-deploy down {holder.config}{host}"
    )


def _try_lock(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether the open file is still the one at its path: its last holder, or what cleans up the directory, may have
    removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
