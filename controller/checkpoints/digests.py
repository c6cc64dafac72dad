"""Digests of files: whole ones for checkpoints, and fingerprints of bounded cost for models and data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from settings.hub import commit_of

CHUNK_BYTES = 1 << 20
FINGERPRINTED_WHOLE_BYTES = 64 << 20
"""Size in bytes up to which a fingerprint reads a whole file; of a larger one it reads `NUM_CHUNKS` chunks."""
NUM_CHUNKS = 64


@dataclass(frozen=True)
class Digest:
    """Size in bytes and sha256 (hex) of a file."""

    size: int
    sha256: str


def digest_of(path: Path, only_size: int | None = None) -> Digest:
    """Reads a file and returns its digest. If `only_size` is given and the file has another size, the file is not
    read, and the digest's sha256 is empty. Raises OSError where it cannot be read."""
    size = path.stat().st_size
    if only_size is not None and size != only_size:
        return Digest(size, "")
    with path.open("rb") as file:
        return Digest(size, hashlib.file_digest(file, "sha256").hexdigest())


def sha256_of_text(text: str) -> str:
    """Returns the sha256 (hex) of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(paths: Iterable[Path]) -> str:
    """Returns a sha256 (hex) over names, sizes and contents of files, in the order of their names. Of a file of more
    than `FINGERPRINTED_WHOLE_BYTES` it reads `NUM_CHUNKS` evenly spaced chunks of `CHUNK_BYTES`, first and last
    included. Raises OSError where a file cannot be read."""
    whole = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= FINGERPRINTED_WHOLE_BYTES:
                whole.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for number in range(NUM_CHUNKS):
                file.seek((size - CHUNK_BYTES) * number // (NUM_CHUNKS - 1))
                whole.update(file.read(CHUNK_BYTES))
    return whole.hexdigest()


def model_fingerprint(directory: Path) -> str:
    """Returns the `fingerprint` of the files of a model directory, or the commit of a model on the hub; empty where
    this host cannot read it, as where it is on the hosts of the ranks alone."""
    if commit := commit_of(directory):
        return commit
    try:
        return fingerprint(path for path in directory.iterdir() if path.is_file())
    except OSError:
        return ""
