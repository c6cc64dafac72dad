"""The run directory, and functions that read and write its files and turn OSErrors into RlhfErrors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.config.run import check_name
from controller.tracking.ownership import LOCK, Ownership, holder, lock_text
from rlhf.errors import ConfigError, RlhfError

MIN_FREE_BYTES = 16 * 2**20


class RunDirectory:
    """Directory of one run. `create` makes a new one; the constructor wraps an existing path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str, algorithm: str = "") -> RunDirectory:
        """Makes the directory `parent/NAME-ALGORITHM-YYYYmmdd-HHMMSS`, named by local time, with -2, -3, ... appended
        where it exists.

        Args:
            parent: Parent directory, which is made too where it is missing.
            name: Name of the run.
            algorithm: Name of the algorithm; empty: left out of the directory's name.

        Raises:
            ConfigError: `name` is none of a run (`check_name`), `parent` cannot be written to, or less than
                `MIN_FREE_BYTES` of space are free.
        """
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(f"run name {error}") from None
        started = time.strftime("%Y%m%d-%H%M%S")
        # The name of a user's own algorithm may have any characters.
        stem = "-".join(part for part in (name, re.sub(r"\W+", "_", algorithm), started) if part)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(parent).free
            if free < MIN_FREE_BYTES:
                raise ConfigError(
                    f"run directory {parent}: {free / 2**20:.1f} MiB free, "
                    f"at least {MIN_FREE_BYTES // 2**20} MiB are needed"
                )
            return cls(make_unique(parent, stem))
        except OSError as error:
            raise ConfigError(f"run directory {parent}: {_reason(error)}") from error

    def output(self, service: str) -> Path:
        """Returns the directory for a service's trained model, as an absolute path, since services may run in
        different working directories."""
        return self.path.resolve() / service

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that holds the directory for this process, whose end releases it in any case. Holds it on all
        hosts where the file system carries locks of files to them, as NFS does.

        Raises:
            ConfigError: Another process writes to the directory, or its lock file cannot be opened.
        """
        try:
            # NFS carries locks of regular files that are open for writing, and none of directories.
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"run directory {self.path}: {_reason(error)}") from error
        try:
            # A file system without locks has none to refuse.
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"run directory {self.path}: {holder(self.path)} runs in it; wait for its end, or end it "
                        "(kill -KILL where it is stopped)"
                    ) from None
            with writing(self.path, LOCK):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, lock_text().encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def remove_if_only(self, names: Set[str]) -> None:
        """Removes the directory if it has no entries except those in `names` and its lock file. Does nothing where it
        cannot be read or no longer exists."""
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= names | {LOCK}:
                shutil.rmtree(self.path, ignore_errors=True)

    def write_json(self, name: str, obj: Any) -> Path:
        """Writes `obj` to file `name` as indented strict JSON (see `json_text`), atomically; returns the file's path.

        Raises:
            RlhfError: Writing failed; the text is one line with directory, reason and file.
        """
        return self.write_text(name, json_text(obj, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Writes `text` to file `name`, atomically; returns the file's path. Raises RlhfError where writing fails."""
        return write_atomically(self.path / name, text)


class AppendFile:
    """File in a run directory that records are appended to; each record is on the disk when `append` returns.

    There is no buffer and no thread between caller and file, so that a full disk raises an error in the `append`
    whose record did not fit, and `close` writes nothing.

    Args:
        run_dir: The run directory.
        name: Path of the file in it.
        first: Record that is appended at once. Default: none is.
        syncs: Whether `append` calls fsync. False: records of the last seconds may be lost if the machine crashes.
    """

    def __init__(self, run_dir: Path, name: str, first: bytes = b"", *, syncs: bool = True) -> None:
        self._run_dir, self._name, self._syncs = run_dir, name, syncs
        self._ownership = Ownership(run_dir)
        with writing(run_dir, name):
            (run_dir / name).parent.mkdir(exist_ok=True)
            self._file = open(run_dir / name, "ab", buffering=0)  # noqa: SIM115
        if first:
            with contextlib.ExitStack() as unless_written:
                unless_written.callback(self.close)
                self.append(first)
                unless_written.pop_all()

    def append(self, record: bytes) -> None:
        """Appends one record, and syncs it where `syncs` is set.

        Raises:
            RlhfError: Writing failed, and part of the record may be written; or an error of `check`.
        """
        self.check()
        rest = memoryview(record)
        with writing(self._run_dir, self._name):
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._syncs:
                # Network file systems report a full disk or a quota only here.
                os.fsync(self._file.fileno())

    def check(self) -> None:
        """Raises RlhfError where the file was deleted or replaced, since further records would be lost silently, or
        where another process has taken over the run directory."""
        self._ownership.check()
        try:
            is_there = os.path.samestat(os.stat(self._run_dir / self._name), os.fstat(self._file.fileno()))
        except OSError:
            is_there = False
        if not is_there:
            raise RlhfError(
                f"run directory {self._run_dir}: {self._name} was deleted or replaced while the run wrote to it"
            )

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._file.close()


@contextmanager
def writing(run_dir: Path, name: str) -> Iterator[None]:
    """Context manager that turns an OSError in its body into an RlhfError with directory, reason and file in one
    line."""
    try:
        yield
    except OSError as error:
        raise RlhfError(f"run directory {run_dir}: {_reason(error)} while writing {name}") from error


def write_atomically(path: Path, text: str) -> Path:
    """Writes a text file by writing a temporary file and renaming it, so that a failure leaves the old file
    unchanged; returns the path.

    Raises:
        RlhfError: Writing failed; the text is one line with directory, reason and file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path.parent, path.name):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def json_text(obj: Any, indent: int | None = None) -> str:
    """Returns `obj` as strict JSON, with keys in insertion order and floats as their repr: equal objects give equal
    text.

    Floats that are not finite become the strings "NaN", "Infinity" and "-Infinity" (as in the JSON form of protobuf),
    which `float()` reads back. Other values without a JSON type become their `str()`.
    """
    return json.dumps(_finite(obj), indent=indent, allow_nan=False, default=str)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; an empty one where the file is missing. Raises RlhfError where it is not a
    JSON object."""
    try:
        return _json_object(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except FileNotFoundError:
        return {}


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON Lines file, or nothing where the file is missing.

    A last line without a newline, left by a writer that was killed, is skipped.

    Raises:
        RlhfError: Another line is not a JSON object, or the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield _json_object(line, f"{path} line {number}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RlhfError(f"run directory {path.parent}: {_reason(error)} while reading {path.name}") from error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        obj = json.loads(line)
    except json.JSONDecodeError as error:
        raise RlhfError(f"{where}: not JSON: {error}") from None
    if not isinstance(obj, dict):
        raise RlhfError(f"{where}: not a JSON object")
    return obj


def _finite(obj: Any) -> Any:
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
    if isinstance(obj, Mapping):
        return {str(key): _finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_finite(value) for value in obj]
    return obj


def make_unique(parent: Path, stem: str) -> Path:
    """Makes the directory `parent/stem`, with -2, -3, ... appended where it exists, and returns its path."""
    path, number = parent / stem, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{stem}-{number}"


def sync_directory(path: Path) -> None:
    """Flushes the entries of a directory to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
