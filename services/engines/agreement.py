"""What all ranks of a service do together or not at all.

A rank that gives up while others go on leaves them waiting in their next collective; so before anyone goes on, all
hear whether everyone is well. Ranks are those of the default process group.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from services.ranks import known_to_all

REPLACEABLE = ("manifest.json", "config.json")
"""Files that mark a directory as a checkpoint or a model, which a new one may replace."""


class PeerRankFailed(RuntimeError):
    """Another rank failed at something that all ranks do together; its own error says why."""


@contextmanager
def all_or_none(action: str, device: torch.device) -> Iterator[None]:
    """A block that fails on one rank fails on all. It must contain no collective that a failure would skip.

    Args:
        action: what the block does, for the message on the ranks where it went well.
        device: of tensors that the process group can reduce.

    Raises:
        PeerRankFailed: the block went well here and failed elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - it is raised below, once the others know of it
        error = caught
    num_failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(num_failed)
    if error is not None:
        raise known_to_all(error)
    if num_failed:
        raise known_to_all(PeerRankFailed(f"{action} failed on another rank"))


@contextmanager
def new_directory(directory: Path, device: torch.device) -> Iterator[Path]:
    """Where all ranks write what becomes `directory` once every one of them has, in place of what had that name.

    Whoever reads `directory` sees the old one or the new one, never a part. Of a failure nothing stays.

    Raises:
        ValueError: what has that name is neither a checkpoint nor a model, nor empty.
    """
    is_keeper = dist.get_rank() == 0
    # A sibling, so that it lies on the same file system and taking the name is one rename.
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        with all_or_none(f"creating {partial}", device):
            if is_keeper:
                _refuse_foreign(directory)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with all_or_none(f"writing {partial}", device):
            yield partial
        with all_or_none(f"publishing {directory}", device):
            if is_keeper:
                _replace(directory, partial)
    finally:
        if is_keeper:
            shutil.rmtree(partial, ignore_errors=True)


def _refuse_foreign(directory: Path) -> None:
    """Raises ValueError where `directory` holds something else than an earlier checkpoint or model."""
    if not directory.exists() or any((directory / name).is_file() for name in REPLACEABLE):
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise ValueError(f"{directory} exists and is neither a checkpoint nor a model, so it is not replaced")


def _replace(directory: Path, replacement: Path) -> None:
    previous = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    if directory.exists():
        os.rename(directory, previous)
    os.rename(replacement, directory)
    shutil.rmtree(previous, ignore_errors=True)
