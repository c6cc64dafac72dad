"""Actions that all ranks of a service take together or not at all.

A rank that gives up while others go on leaves them waiting in their next collective; so before anyone goes on, all
hear whether everyone is well. Ranks are those of the default process group.
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

from services.runtime.ranks import FailedAlone, known_to_all
from services.storage.publish import check_replaceable, partial_of, publish, settle

T = TypeVar("T")


class PeerRankFailed(RuntimeError):
    """Another rank failed at something that all ranks do together; its own error says why."""


class RunToEnd(Iterator[T]):
    """The items of an iterator that all ranks run together. `finish` runs what is left of it, since the others wait.

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
            except Exception as error:  # noqa: BLE001 - raised here and by every later call
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
    """A block that fails on one rank fails on all. It contains no collective, except for one iterator that all ranks
    run to its end.

    Args:
        action: what the block does, for the message on the ranks where it went well.
        device: of tensors that the process group can reduce.
        collective: that iterator.

    Raises:
        PeerRankFailed: the block went well here and failed elsewhere.
        FailedAlone: the iterator failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - it is raised below, once the others know of it
        error = caught
    collective.finish()
    num_failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(num_failed)
    if error is not None:
        raise known_to_all(error)
    if num_failed:
        raise known_to_all(PeerRankFailed(f"{action} failed on another rank"))


@contextmanager
def new_directory(
    directory: Path,
    device: torch.device,
    progressed: Callable[[], None] = lambda: None,
    collective: RunToEnd[Any] = NO_COLLECTIVE,
) -> Iterator[Path]:
    """Where all ranks write what becomes `directory` once every one of them has, in place of what had that name.

    A reader of `directory` sees the old one or the new one, never a part, also after a crash. Of a failure nothing
    stays.

    Args:
        progressed: called after each file that is brought to the disk.
        collective: as of `all_or_none`, for the time in which ranks write.

    Raises:
        ValueError: a directory of that name holds something else than an earlier checkpoint or model of ours.
    """
    is_keeper = dist.get_rank() == 0
    partial = partial_of(directory)
    try:
        with all_or_none(f"creating {partial}", device):
            if is_keeper:
                settle(directory)
                check_replaceable(directory)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with all_or_none(f"writing {partial}", device, collective):
            yield partial
        with all_or_none(f"publishing {directory}", device):
            if is_keeper:
                publish(partial, directory, progressed)
    finally:
        if is_keeper:
            shutil.rmtree(partial, ignore_errors=True)
