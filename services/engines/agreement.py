"""Actions that all ranks of the default process group complete together or not at all.

A rank that fails while others go on would leave them waiting in their next collective. So ranks exchange whether they
failed before any of them goes on.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf.errors import OutOfStep
from services.runtime.ranks import FailedAlone, known_to_all
from services.storage.publish import check_replaceable, partial_of, publish, settle

T = TypeVar("T")


class PeerRankFailed(RuntimeError):
    """Another rank failed in an action of all ranks; the error on that rank has the cause."""


class RunToEnd(Iterator[T]):
    """A collective iterator that every rank must run to its end. `finish` runs the rest of it for a rank that stopped.

    Args:
        progressed: called after each item.

    Raises:
        FailedAlone: the iterator itself failed.
    """

    def __init__(self, collective: Iterable[T], progressed: Callable[[], None] = lambda: None) -> None:
        self._items, self._progressed = iter(collective), progressed
        self._failure: Exception | None = None

    def __next__(self) -> T:
        if self._failure is None:
            try:
                item = next(self._items)
            except StopIteration:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, now and by every later call
                self._failure = error
            else:
                self._progressed()
                return item
        failure = self._failure
        raise FailedAlone(f"{type(failure).__name__}: {failure}") from failure

    def finish(self) -> None:
        """Runs the iterator to its end."""
        deque(self, maxlen=0)


NO_COLLECTIVE: RunToEnd[object] = RunToEnd(())


@contextmanager
def all_or_none(
    action: str, device: torch.device, collective: RunToEnd[Any] = NO_COLLECTIVE
) -> Iterator[None]:
    """A block that fails on every rank if it fails on one. Collective. The block contains no collective but the
    iterator `collective`.

    Args:
        action: name of the block, for the message on ranks that did not fail.
        device: device of tensors that the process group can reduce.
        collective: iterator that all ranks run to its end.

    Raises:
        PeerRankFailed: the block failed on another rank only.
        FailedAlone: the iterator failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know
        error = caught
    collective.finish()
    num_failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(num_failed)
    if error is not None:
        raise known_to_all(error)
    if num_failed:
        raise known_to_all(PeerRankFailed(f"{action} failed on another rank"))


@contextmanager
def takes_effect(action: str) -> Iterator[None]:
    """A block that follows an agreement of all ranks and changes this rank's state. Its failure on one rank cannot be
    undone on the others.

    Args:
        action: name of the block, for the message.

    Raises:
        OutOfStep: the block failed; the rank must exit.
    """
    try:
        yield
    except Exception as error:
        raise OutOfStep(
            f"rank {dist.get_rank()} failed alone in {action}, which all ranks had agreed on: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def new_directory(
    directory: Path,
    device: torch.device,
    progressed: Callable[[], None] = lambda: None,
    collective: RunToEnd[Any] = NO_COLLECTIVE,
) -> Iterator[Path]:
    """A directory for all ranks to write to, published as `directory` once every rank has written. Collective.

    A reader of `directory` sees the old one or the new one, never a part, also after a crash. A failure leaves no
    files.

    Args:
        progressed: called after each synced file.
        collective: iterator of `all_or_none` that ranks run while they write.

    Raises:
        ValueError: `directory` holds files other than those of an earlier checkpoint or model.
    """
    is_rank_0 = dist.get_rank() == 0
    partial = partial_of(directory)
    try:
        with all_or_none(f"creating {partial}", device):
            if is_rank_0:
                settle(directory)
                check_replaceable(directory)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with all_or_none(f"writing {partial}", device, collective):
            yield partial
        with all_or_none(f"publishing {directory}", device):
            if is_rank_0:
                publish(partial, directory, progressed)
    finally:
        if is_rank_0:
            shutil.rmtree(partial, ignore_errors=True)
