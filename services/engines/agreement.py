"""Context managers whose blocks fail on all ranks of the default process group if they fail on one.

A rank that fails while the others continue would leave them waiting in their next collective. So the ranks exchange
whether they failed before any of them continues.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf.errors import OutOfStep
from services.runtime.ranks import FailedAlone, known_to_all
from services.storage.publish import check_replaceable, only_writer, partial_of, publish, settle

T = TypeVar("T")


class PeerRankFailed(RuntimeError):
    """Raised on a rank that did not fail itself in an action that failed on another rank; that rank's error has the
    cause."""


class RunToEnd(Iterator[T]):
    """Iterator around a collective one that every rank must run to its end. `finish` runs what is left of it, for a
    rank that stopped early.

    Args:
        collective: iterable whose steps are collective.
        progressed: called after each item.

    Raises:
        FailedAlone: `collective` failed on this rank; raised by every later step too.
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
        """Runs the iterator to its end and drops the items. Raises FailedAlone if it fails or has failed."""
        deque(self, maxlen=0)


NO_COLLECTIVE: RunToEnd[object] = RunToEnd(())


@contextmanager
def all_or_none(action: str, collective: RunToEnd[Any] = NO_COLLECTIVE) -> Iterator[None]:
    """Context manager of a block that fails on every rank if it fails on one. Collective: ranks all-reduce after the
    block whether they failed, in host memory, since that of a GPU may have run out. The block must contain no
    collective besides the iterator `collective`.

    Args:
        action: name of the block, for the message on ranks that did not fail.
        collective: iterator that the block may run, and that is run to its end on every rank, even if the block
            failed. Default: none.

    Raises:
        Exception: the block failed on this rank; its own error, marked as known to all ranks.
        PeerRankFailed: the block failed on another rank only.
        FailedAlone: the iterator failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know
        error = caught
    collective.finish()
    num_failed = torch.tensor(int(error is not None))
    dist.all_reduce(num_failed)
    if error is not None:
        raise known_to_all(error)
    if num_failed:
        raise known_to_all(PeerRankFailed(f"{action} failed on another rank"))


@contextmanager
def takes_effect(action: str) -> Iterator[None]:
    """Context manager of a block that changes this rank's state after all ranks have agreed to. The other ranks
    cannot undo their change if it fails here, so its error becomes OutOfStep, upon which the process of this rank
    exits. Not collective.

    Args:
        action: name of the block, for the message.

    Raises:
        OutOfStep: the block failed.
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
    progressed: Callable[[], None] = lambda: None,
    collective: RunToEnd[Any] = NO_COLLECTIVE,
) -> Iterator[Path]:
    """Context manager that yields a temporary directory for all ranks to write to. After the block, rank 0 publishes
    it as `directory`, which replaces an earlier one. Collective.

    A reader of `directory` finds the old contents or the new ones, never a part of them, even after a crash. If any
    rank fails, the temporary directory is removed.

    Args:
        directory: final path; on a file system that all ranks share.
        progressed: called after each file that is synced to disk.
        collective: iterator that ranks run while they write, as for `all_or_none`.

    Raises:
        ValueError: `directory` holds files other than those of an earlier checkpoint or model. (This and any other
            error on the rank where it occurred, PeerRankFailed on the others.)
        Refused: Another service or call is writing `directory`.
    """
    is_rank_0 = dist.get_rank() == 0
    partial = partial_of(directory)
    with ExitStack() as held:
        with all_or_none(f"creating {partial}"):
            if is_rank_0:
                held.enter_context(only_writer(directory))
                settle(directory)
                check_replaceable(directory)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
        with all_or_none(f"writing {partial}", collective):
            yield partial
        with all_or_none(f"publishing {directory}"):
            if is_rank_0:
                publish(partial, directory, progressed)
