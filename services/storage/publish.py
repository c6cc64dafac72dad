"""Publishes directories atomically: a reader finds a directory complete or not at all.

A published directory lists its files, and may be replaced by a later one. A directory with any other file is not
replaced, since it may hold a user's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf.errors import Refused

FILES = "rlhf-files.json"
"""Name of the file in a published directory that lists all its other files, by relative path."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def partial_of(directory: Path) -> Path:
    """Returns the path at which a directory is written before `publish` renames it: a sibling, and so on the same
    file system."""
    return directory.with_name(f".{directory.name}.rlhf-partial")


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[Path]:
    """Context manager that holds an exclusive lock on writing to `directory` and yields `partial_of(directory)`. The
    lock also excludes processes on other hosts if the file system supports it. Creates the parents of `directory`; on
    exit, removes the partial path.

    Raises:
        Refused: Another writer is in the block.
        OSError: The lock, a file beside `directory`, cannot be created.
    """
    path, partial = directory.with_name(f".{directory.name}.rlhf-lock"), partial_of(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _locked(descriptor, path):
            raise Refused(f"{directory} is being written by another call, which has to end first")
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            # Removed while locked, so that a writer that has opened the file already detects it.
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def check_replaceable(directory: Path) -> None:
    """Raises ValueError if `directory` exists and is not a directory, or contains files that `publish` has not
    listed. Returns if it does not exist or is empty."""
    if not os.path.lexists(directory):
        return
    if directory.is_symlink() or not directory.is_dir():
        raise ValueError(f"{directory} exists and is not a directory, so it is not replaced")
    found = _files(directory)
    if not found:
        return
    try:
        listed = set(json.loads((directory / FILES).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{directory} exists and contains no valid {FILES}, which marks a checkpoint or a model of rlhf-cluster; "
            "it is not replaced"
        ) from None
    if others := sorted(found - listed - {FILES}):
        raise ValueError(
            f"{directory} also contains {others[0]}, which {FILES} does not list, so it is not replaced"
        )


def make_empty(directory: Path) -> None:
    """Creates a directory and its parents if they do not exist. Raises ValueError if it is not a directory or not
    empty."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"{directory} exists and is not a directory") from None
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty, so no checkpoint is written into it")


def check_writable(directory: Path) -> None:
    """Raises ValueError if `directory` could not be published now: it may not be replaced (`check_replaceable`), or
    its nearest existing parent is not writable. Leaves no files."""
    check_replaceable(directory)
    nearest = next(parent for parent in directory.parents if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise ValueError(f"{directory} cannot be written: {nearest}: {error.strerror}") from error


def publish(partial: Path, directory: Path, progressed: Callable[[], None] = lambda: None) -> None:
    """Writes the list FILES into the directory `partial`, syncs all its files to disk, and renames it to `directory`,
    which it replaces without a check (see `check_replaceable`). After a crash, `readable_path` gives the old contents
    or the new ones; the next `settle` removes what is left over.

    Args:
        partial: Complete directory, at `partial_of(directory)`.
        directory: Final path.
        progressed: Called after each file that is synced.

    Raises:
        OSError: The directory could not be written.
    """
    (partial / FILES).write_text(json.dumps({"files": sorted(_files(partial))}, indent=2) + "\n")
    for path in partial.rglob("*"):
        sync(path)
        progressed()
    sync(partial)
    previous = _previous_of(directory)
    if not os.path.lexists(directory):
        os.rename(partial, directory)
    elif _exchange(partial, directory):
        previous = partial
    else:
        os.rename(directory, previous)
        os.rename(partial, directory)
    sync(directory.parent)
    shutil.rmtree(previous, ignore_errors=True)


def readable_path(directory: Path) -> Path:
    """Returns the path from which the contents of `directory` can be read. This is `directory` itself, unless
    `publish` is or was interrupted between its two renames on a file system without an atomic exchange; then it is
    the path of the previous directory. Changes nothing, so it may be called beside a writer."""
    previous = _previous_of(directory)
    return previous if not os.path.lexists(directory) and os.path.lexists(previous) else directory


def settle(directory: Path) -> None:
    """Cleans up after an interrupted `publish`: removes the previous directory if the new one is in place, otherwise
    renames it back to `directory`. To be called by the only writer of `directory` before it publishes again."""
    previous = _previous_of(directory)
    if os.path.lexists(directory):
        shutil.rmtree(previous, ignore_errors=True)
    elif os.path.lexists(previous):
        os.rename(previous, directory)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a directory, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, path: Path) -> bool:
    """Locks an open file, without waiting; returns whether this succeeded and `path` still names the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _previous_of(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.rlhf-previous")


def _files(directory: Path) -> set[str]:
    """Returns the relative paths of all files and symbolic links below a directory."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(directory).as_posix() for path in paths}


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two directories atomically and returns True; returns False if the system or file system
    does not support it. Raises OSError if it fails for another reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one))
