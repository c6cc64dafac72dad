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
        raise error
    if num_failed:
        raise PeerRankFailed(f"{action} failed on another rank")


@contextmanager
def new_directory(directory: Path, device: torch.device) -> Iterator[Path]:
    """Where all ranks write what becomes `directory` once every one of them has, in place of what had that name.

    Whoever reads `directory` sees the old one or the new one, never a part. Of a failure nothing stays.
    """
    is_keeper = dist.get_rank() == 0
    # A sibling, so that it lies on the same file system and taking the name is one rename.
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        with all_or_none(f"creating {partial}", device):
            if is_keeper:
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


def _replace(directory: Path, replacement: Path) -> None:
    previous = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    if directory.exists():
        os.rename(directory, previous)
    os.rename(replacement, directory)
    shutil.rmtree(previous, ignore_errors=True)
