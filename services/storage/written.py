"""Files that are written past the page cache and synced to disk, with their sha256."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

_PART_BYTES = 16 << 20


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        path: Its path.
        sha256: sha256 (hex) of the content as it was in memory; empty if it was not taken there.
    """

    path: Path
    sha256: str = ""

    def digest(self) -> str:
        """Returns `sha256`, or that of the file, which is then read; raises OSError where it cannot be."""
        if self.sha256:
            return self.sha256
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def written_below(directory: Path) -> list[WrittenFile]:
    """Returns all files below a directory, in the order of their paths."""
    return [WrittenFile(path) for path in sorted(directory.rglob("*")) if path.is_file()]


def write_file(path: Path, content: memoryview) -> WrittenFile:
    """Writes a file, or replaces its content, and syncs it to disk.

    Whole pages go from the memory of the caller to the disk (O_DIRECT) where the file system can do that and the memory
    begins at a page: the kernel does not copy them, and they take no part of the page cache.

    Args:
        path: Path of the file, in an existing directory.
        content: Bytes of the file, contiguous.

    Raises:
        OSError: The file could not be written.
    """
    with path.open("wb", buffering=0) as file:
        done = _write_pages(file.fileno(), content)
        while done < len(content):
            done += file.write(content[done : done + _PART_BYTES])
        os.fsync(file.fileno())
    return WrittenFile(path, hashlib.sha256(content).hexdigest())


def _write_pages(descriptor: int, content: memoryview) -> int:
    """Writes whole pages to an empty file without the page cache; returns the bytes written, which may be 0, as
    where the file system or the address does not allow it. Raises OSError where the disk is full or fails."""
    flags, done, whole = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0, len(content) & -mmap.PAGESIZE
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole and done % mmap.PAGESIZE == 0:
            done += os.write(descriptor, content[done : min(done + _PART_BYTES, whole)])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done
